"""Batches that carry the keys of the next one. In: a data set. Out: the same, one batch ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf.distributed.batches import element_of, loosen, map_in_step, no_inputs
from slipstream_tf.errors import invalid

KEYS = "keys"
NEXT_KEYS = "next_keys"
"""Name of the feature that holds what "keys" of the next batch does."""


def with_next(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Adds the next batch's keys to each batch: features["next_keys"], laid out as "keys".

    The last batch gets keys of no inputs. For training data of sharded tables with `prefetch=True`.
    Put it last, after `Slipstream.apply` and `even_ends`; a `.prefetch` may follow. It asks for
    each batch one step ahead, as a `.prefetch(1)` would: a new threshold comes one batch later.

    Args:
        dataset: its elements are batches: features, or a tuple that begins with them. Features are
            a dictionary with "keys": a dense tensor, a RaggedTensor, or a dictionary of these.

    Raises:
        ValueError: there are no such features, they have "next_keys", or a component is neither
            dense nor ragged, or has no batch dimension.
    """
    spec = dataset.element_spec
    _require_keys(spec)
    end = loosen(tf.nest.map_structure(lambda part: no_inputs(part, "with_next"), spec))
    batches = map_in_step(dataset, lambda *parts: loosen(element_of(spec, parts)))

    def pair(before: tuple[tf.Tensor, ...], element: Any) -> Any:
        complete = _with_keys(_packed_as(element, before), _features(element)[KEYS])
        return _tensors(element), complete

    # The first pair is of no batch with the first one.
    ended = batches.concatenate(tf.data.Dataset.from_tensors(end))
    paired = ended.scan(_tensors(end), pair).skip(1)
    count = int(dataset.cardinality().numpy())
    return paired.apply(tf.data.experimental.assert_cardinality(count)) if count > 0 else paired


def _tensors(element: Any) -> tuple[tf.Tensor, ...]:
    # The state of a scan is of dense tensors only.
    return tuple(tf.nest.flatten(element, expand_composites=True))


def _packed_as(element: Any, tensors: tuple[tf.Tensor, ...]) -> Any:
    return tf.nest.pack_sequence_as(element, tensors, expand_composites=True)


def _features(element: Any) -> Any:
    return element[0] if isinstance(element, tuple) else element


def _with_keys(element: Any, next_keys: Any) -> Any:
    features = {**_features(element), NEXT_KEYS: next_keys}
    return (features, *element[1:]) if isinstance(element, tuple) else features


def _require_keys(spec: Any) -> None:
    features = _features(spec)
    if not isinstance(features, Mapping) or KEYS not in features or NEXT_KEYS in features:
        allowed = f"features, a dictionary with {KEYS!r} and without {NEXT_KEYS!r}"
        raise invalid("dataset", spec, "with_next", allowed)
