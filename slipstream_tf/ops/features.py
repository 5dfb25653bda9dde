"""The one input format of lookups and classification: keys of several features over one batch.

In: what a user feeds (a matrix with a column per feature, or a dictionary of dense, padded or
ragged keys). Out: `PackedFeatures`, the tensors and attributes that the ops take.
"""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from slipstream_tf.errors import invalid

PADDING_KEY = -1


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """A feature: named keys of an input that are looked up in a table.

    Attributes:
        name: name in the input dictionary.
        table: name of its table; several features may share one.
        combiner: "sum", "mean" or "sqrtn" for bags.
    """

    name: str
    table: str
    combiner: str = "sum"


@dataclasses.dataclass(frozen=True)
class PackedFeatures:
    """Tensors and attributes of the ops' common inputs.

    Attributes:
        keys: int64 tensors: [batch] or [batch, width], or flat [total] with row splits.
        row_splits: int64 tensors [batch + 1].
        weights: float32 tensors, each of the shape of the keys it belongs to.
        attrs: feature_keys, feature_column, feature_splits, feature_weights (lists of int, one
            entry per feature; -1: none).
    """

    keys: list[tf.Tensor]
    row_splits: list[tf.Tensor]
    weights: list[tf.Tensor]
    attrs: dict[str, list[int]]

    def of(self, feature: int) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Returns (keys, row splits, weights) of a feature by its position; None: it has none.

        The keys are int64 [batch], [batch, width] padded with PADDING_KEY, or flat with row splits.
        """
        tensor, column, split, weight = (indices[feature] for indices in self.attrs.values())
        return (
            self.keys[tensor] if column < 0 else self.keys[tensor][:, column],
            self.row_splits[split] if split >= 0 else None,
            self.weights[weight] if weight >= 0 else None,
        )

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of an op that takes features."""
        return {
            "keys": self.keys,
            "row_splits": self.row_splits,
            "weights": self.weights,
            "padding_key": PADDING_KEY,
            **self.attrs,
        }


def _keys_tensor(value: Any, place: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype == tf.int32:
        tensor = tf.cast(tensor, tf.int64)
    if tensor.dtype != tf.int64:
        raise invalid("keys", tensor.dtype.name, place, "an int64 (or int32) tensor")
    return tensor


def _pack_matrix(inputs: Any, specs: Sequence[FeatureSpec]) -> PackedFeatures:
    keys = _keys_tensor(inputs, "the key matrix")
    count = len(specs)
    if keys.shape.rank != 2 or keys.shape[1] not in (None, count):
        names = ", ".join(spec.name for spec in specs)
        allowed = f"shape [batch, {count}], a column per feature: {names}"
        raise invalid("keys", keys.shape, "the key matrix", allowed)
    none = [-1] * count
    attrs = {
        "feature_keys": [0] * count,
        "feature_column": list(range(count)),
        "feature_splits": none,
        "feature_weights": none,
    }
    return PackedFeatures([keys], [], [], attrs)


def _flat_weights(value: Any, keys_value: Any, place: str) -> tf.Tensor:
    if isinstance(keys_value, tf.RaggedTensor):
        if isinstance(value, tf.RaggedTensor):
            return tf.cast(value.flat_values, tf.float32)
        raise invalid("weights", type(value).__name__, place, "a RaggedTensor, as the keys are")
    if isinstance(value, tf.RaggedTensor):
        raise invalid("weights", "RaggedTensor", place, "a dense tensor, as the keys are")
    return tf.cast(tf.convert_to_tensor(value), tf.float32)


def pack(
    inputs: Any, specs: Sequence[FeatureSpec], weights: Mapping[str, Any] | None = None
) -> PackedFeatures:
    """Packs the keys of a batch for the ops.

    Args:
        inputs: a matrix int64 [batch, features] with a column per feature, in order; or a
            dictionary from feature name to int64 [batch], int64 [batch, width] padded with -1,
            or a RaggedTensor int64 [batch, None]. int32 keys are widened.
        specs: the features, in order.
        weights: per-key weights by feature name, float32 of the keys' shape (dictionary input
            only). Weights are constants: no gradient flows to them.

    Returns:
        The packed tensors.

    Raises:
        ValueError: a feature is missing or unknown, keys are of another dtype or rank, or weights
            are not laid out like the keys.
    """
    weights = dict(weights or {})
    if not isinstance(inputs, Mapping):
        if weights:
            allowed = "weights with dictionary input"
            raise invalid("weights", sorted(weights), "a key matrix", allowed)
        return _pack_matrix(inputs, specs)
    features = [spec.name for spec in specs]
    for given, what in ((inputs, "inputs"), (weights, "weights")):
        unknown = sorted(set(given) - set(features))
        if unknown:
            allowed = "features " + ", ".join(features)
            raise invalid(what, unknown, "the features of a batch", allowed)
    missing = [name for name in features if name not in inputs]
    if missing:
        allowed = "all features; missing: " + ", ".join(missing)
        raise invalid("inputs", sorted(inputs), "a batch", allowed)
    names = ("feature_keys", "feature_column", "feature_splits", "feature_weights")
    packed = PackedFeatures([], [], [], {name: [] for name in names})
    for spec in specs:
        value, place = inputs[spec.name], f"feature {spec.name!r}"
        split = weight = -1
        if isinstance(value, tf.RaggedTensor):
            if value.ragged_rank != 1 or value.flat_values.shape.rank != 1:
                raise invalid("keys", value.shape, place, "one ragged dimension: [batch, None]")
            split = len(packed.row_splits)
            packed.row_splits.append(tf.cast(value.row_splits, tf.int64))
            keys = _keys_tensor(value.flat_values, place)
        else:
            keys = _keys_tensor(value, place)
            if keys.shape.rank not in (1, 2):
                allowed = "[batch], [batch, width] or a RaggedTensor [batch, None]"
                raise invalid("keys", keys.shape, place, allowed)
        if weights.get(spec.name) is not None:
            weight = len(packed.weights)
            packed.weights.append(_flat_weights(weights[spec.name], value, place))
        for name, index in zip(packed.attrs, (len(packed.keys), -1, split, weight), strict=True):
            packed.attrs[name].append(index)
        packed.keys.append(keys)
    return packed


def table_names(tables: Sequence[str], place: str) -> tuple[str, ...]:
    """Checks the names of a classifier's tables.

    Raises:
        ValueError: there is none, or one is given twice.
    """
    tables = tuple(tables)
    if not tables or len(set(tables)) != len(tables):
        raise invalid("tables", tables, place, "one or more names, each once")
    return tables


def table_indices(
    specs: Sequence[FeatureSpec], tables: Sequence[str], ignored_tables: Set[str], ignored: int
) -> list[int]:
    """Returns the index of each feature's table among `tables`; `ignored` for ignored ones.

    Raises:
        ValueError: a table is neither.
    """
    indices = []
    for spec in specs:
        if spec.table in ignored_tables:
            indices.append(ignored)
        elif spec.table in tables:
            indices.append(tables.index(spec.table))
        else:
            allowed = "a table of the classifier: " + ", ".join(tables)
            raise invalid("table", spec.table, f"feature {spec.name!r}", allowed)
    return indices
