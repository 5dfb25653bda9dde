"""Numbers for the inputs of a data set of the user's own: features["id"].

In: batches of `(features, label)` or `(features, label, sample_weight)`. Out: the same batches with
a number per input, by its position or by its content.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.errors import invalid, require_choice
from slipstream_tf.hashing import finalise, mix64
from slipstream_tf.inputs.batches import num_rows, static_batch_size
from slipstream_tf.inputs.notes import FEATURES, add_notes, without_wrapping
from slipstream_tf.inputs.spec import ID, NOTES
from slipstream_tf.ops.features import PADDING_KEY

KINDS = ("position", "hash")
# Any odd constant but SplitMix64's own: where positions start, so that 0 is mixed, too.
_FIRST_POSITION = np.uint64(0xD1B54A32D192ED03)


def with_ids(dataset: tf.data.Dataset, by: str = "position") -> tf.data.Dataset:
    """Adds features["id"], int64 [batch], a number of at least 0 per input.

    - "position": the running number in one pass. The same input has the same number in every pass
      only if the order before this transformation is fixed: put it before shuffling.
    - "hash": 63 bits mixed from all features and the labels, whatever the order. Equal inputs have
      equal numbers. Of n different inputs, two or more share a number with a probability of about
      n**2 / 2**64: 5e-8 for a million, 0.05 for a billion. Padding (-1) within "keys", or within
      any feature of integers where there is no "keys", does not count, so that the width to which a
      batch is padded does not matter; a bag's order does.

    Args:
        dataset: its elements are batches `(features, label)` or `(features, label,
            sample_weight)` of dense tensors and RaggedTensors; features is a mapping, with "keys"
            or flat, or a key matrix, or a tuple.
        by: "position" or "hash".

    Returns:
        The dataset; each element as it was, with "id" in a dictionary of the features. Features
        that are no mapping are in it under `notes.FEATURES`, for `Slipstream.apply`; a model with
        `keras.LossFeedback` gets them as they were.

    Raises:
        ValueError: `by` is unknown, or the elements are of another form.
    """
    require_choice("by", by, KINDS, "with_ids")
    element_spec = dataset.element_spec
    _require_form(element_spec)
    batch_size = static_batch_size(element_spec)

    def add(ids: tf.Tensor, element: Any) -> Any:
        ids = tf.ensure_shape(ids, [batch_size])
        return (add_notes(element[0], **{ID: ids}), *element[1:])

    def numbered(first: tf.Tensor, element: Any) -> Any:
        end = first + num_rows(tf.nest.flatten(element)[0])
        return end, add(tf.range(first, end), element)

    if by == "position":
        return dataset.scan(tf.constant(0, tf.int64), numbered)
    return dataset.map(lambda *element: add(hash_inputs(*element[:2]), element))


def _require_form(element_spec: Any) -> None:
    if not (isinstance(element_spec, tuple) and len(element_spec) in (2, 3)):
        allowed = "(features, label) or (features, label, sample_weight)"
        raise invalid("dataset", element_spec, "with_ids", allowed)
    features = element_spec[0]
    if isinstance(features, Mapping) and ID in features:
        allowed = 'features without "id"; leave with_ids out, or rename that feature'
        raise invalid("dataset", sorted(features), "with_ids", allowed)


def hash_inputs(features: Any, label: Any) -> tf.Tensor:
    """Hashes each input of a batch, by its content alone.

    Args:
        features: dense tensors and RaggedTensors, nested; notes of `inputs.notes` do not count.
            Where they are no mapping with "keys", all of them are hashed as keys are.
        label: a tensor, or several, nested.

    Returns:
        int64 [batch], at least 0.
    """
    features = without_wrapping(features)
    content = features if isinstance(features, Mapping) else {FEATURES: features}
    content = {name: value for name, value in content.items() if name not in NOTES}
    keys, content = ({"keys": content.pop("keys")}, content) if "keys" in content else (content, {})
    parts = [_hash_rows(part, True) for part in tf.nest.flatten(keys)]
    parts += [_hash_rows(part, False) for part in tf.nest.flatten((content, label))]
    total = _join_last_axis(tf.stack(parts, axis=1))
    return tf.bitcast(total, tf.int64) & tf.int64.max


def _hash_rows(component: Any, is_key: bool) -> tf.Tensor:
    """Hashes each row of a component to uint64 [rows]; 0 is a row of nothing but padding."""
    if isinstance(component, tf.RaggedTensor):
        values = _hash_rows(component.values, is_key)
        row = component.value_rowids()
        position = tf.range(tf.size(row, row.dtype)) - tf.gather(component.row_starts(), row)
        return tf.math.unsorted_segment_sum(_at(position, values), row, component.nrows())
    if component.shape.rank is None:
        raise invalid("dataset", component, "with_ids", "components of known rank (ensure_shape)")
    hashed = mix64(_bits(component))
    if is_key and component.dtype in (tf.int32, tf.int64):
        hashed = tf.where(tf.equal(component, PADDING_KEY), tf.zeros_like(hashed), hashed)
    # Axis by axis, so that a position does not depend on how wide the padded last axis is.
    for _ in range(component.shape.rank - 1):
        hashed = _join_last_axis(hashed)
    return hashed


def _join_last_axis(hashed: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(_at(tf.range(tf.shape(hashed)[-1]), hashed), axis=-1)


def _at(position: tf.Tensor, hashed: tf.Tensor) -> tf.Tensor:
    """Mixes hashes with their positions, so that a sum of them tells the order; 0 stays 0."""
    salt = finalise(tf.cast(position, tf.uint64) + _FIRST_POSITION)
    return tf.where(tf.equal(hashed, 0), tf.zeros_like(hashed), finalise(hashed + salt))


def _bits(component: tf.Tensor) -> tf.Tensor:
    """Returns the values as uint64, different ones for different values."""
    kind = component.dtype
    if kind == tf.string:
        component = tf.strings.to_hash_bucket_fast(component, tf.int64.max)
    elif kind == tf.float64:
        component = tf.bitcast(component, tf.int64)
    elif kind.is_floating:
        component = tf.bitcast(tf.cast(component, tf.float32), tf.int32)
    elif not (kind.is_integer or kind.is_bool):
        raise invalid("dataset", kind.name, "with_ids", "numbers, booleans and text")
    if kind == tf.uint64:
        return component
    return tf.bitcast(tf.cast(component, tf.int64), tf.uint64)


def require_ids(element_spec: Any, names: Collection[str] = ()) -> None:
    """Raises ValueError if batches have no ids, which `Slipstream.apply` needs to remember losses.

    Args:
        element_spec: of a data set of features, or of tuples that begin with them.
        names: of the layer's features: "id" may be one of them.
    """
    features = element_spec[0] if isinstance(element_spec, tuple) else element_spec
    place = "Slipstream.apply, where losses are remembered"
    if not (isinstance(features, Mapping) and ID in features):
        allowed = "features with 'id', int64 [batch]: use inputs.with_ids, or a reader's ids=True"
        raise invalid("dataset", element_spec, place, allowed)
    if ID in names and "keys" not in features:
        allowed = "another name for the layer's feature 'id': it is the name of an input's number"
        raise invalid("dataset", sorted(features), place, allowed)
    ids = features[ID]
    if not (isinstance(ids, tf.TensorSpec) and ids.dtype.is_integer and ids.shape.rank == 1):
        raise invalid("features['id']", ids, place, "integers [batch]")
