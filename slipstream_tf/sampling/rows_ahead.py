"""Rows begin to come from the disk before their batch is trained.

In: a data set, and a store whose tables spill. Out: the same batches; as one passes by, its keys
are told to the store.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.sampling.classifier import as_it_is, default_keys
from slipstream_tf.sampling.notes import without_wrapping
from slipstream_tf.tables.base import EmbeddingStore


def announce_rows(
    dataset: tf.data.Dataset,
    store: EmbeddingStore,
    specs: Sequence[FeatureSpec],
    get_keys: Callable[..., Any] | None = None,
) -> tf.data.Dataset:
    """Returns the same batches, which are announced to a store as they are made.

    What follows must ask for them ahead of their use: a `.prefetch(1)` or `Slipstream.read_ahead`.

    Args:
        dataset: elements are batches.
        store: whose tables spill; of another, the data set comes back as it is.
        specs: the features whose keys are meant.
        get_keys: as of `Slipstream.apply`.
    """
    if not store.spills:
        return dataset
    keys_of = get_keys or functools.partial(default_keys, specs)
    is_tuple = isinstance(dataset.element_spec, tuple)

    def announce(*components: Any) -> Any:
        keys = keys_of(without_wrapping(components[0]), *components[1:])
        store.announce_rows(pack(keys, specs), specs)
        return components if is_tuple else components[0]

    return dataset.map(as_it_is(announce, get_keys))
