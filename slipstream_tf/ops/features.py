"""The one input format of lookups and classification: keys of several features over one batch.

In: what a user feeds (a matrix with a column per feature, or a dictionary of dense, padded, ragged
or sparse keys: integers or texts). Out: `PackedFeatures`, the tensors and attributes that the ops
take.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.ops.text_keys import hash_texts

PADDING_KEY = -1


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """A feature: named keys of an input that are looked up in a table.

    Attributes:
        name: name in the input dictionary.
        table: name of its table; several features may share one.
        combiner: "sum", "mean" or "sqrtn" for bags; None: each key's row comes out, none is pooled.
        padding_key: the key that stands for no key, in every layout of keys; of texts it is the
            empty one. None: every key is a key.
    """

    name: str
    table: str
    combiner: str | None = "sum"
    padding_key: int | None = PADDING_KEY


@dataclasses.dataclass(frozen=True)
class PackedFeatures:
    """Tensors and attributes of the ops' common inputs.

    Attributes:
        keys: int64 tensors: [batch] or [batch, width], or flat [total] with row splits.
        row_splits: int64 tensors [batch + 1].
        weights: float32 tensors, each of the shape of the keys it belongs to.
        attrs: feature_keys, feature_column, feature_splits, feature_weights (lists of int, one
            entry per feature; -1: none).
        specs: the features, in order.
    """

    keys: list[tf.Tensor]
    row_splits: list[tf.Tensor]
    weights: list[tf.Tensor]
    attrs: dict[str, list[int]]
    specs: tuple[FeatureSpec, ...]

    def of(self, feature: int) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Returns (keys, row splits, weights) of a feature by its position; None: it has none.

        The keys are int64 [batch], [batch, width], or flat with row splits.
        """
        tensor, column, split, weight = (indices[feature] for indices in self.attrs.values())
        return (
            self.keys[tensor] if column < 0 else self.keys[tensor][:, column],
            self.row_splits[split] if split >= 0 else None,
            self.weights[weight] if weight >= 0 else None,
        )

    def is_key(self, feature: int) -> tf.Tensor | None:
        """Returns which of a feature's keys are there, bool in their shape; None: all are."""
        padding_key = self.specs[feature].padding_key
        if padding_key is None:
            return None
        return tf.not_equal(self.of(feature)[0], tf.constant(padding_key, tf.int64))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of an op that takes features."""
        return {
            "keys": self.keys,
            "row_splits": self.row_splits,
            "weights": self.weights,
            "padding_keys": [spec.padding_key or 0 for spec in self.specs],
            "has_padding": [spec.padding_key is not None for spec in self.specs],
            "feature_names": [spec.name for spec in self.specs],
            **self.attrs,
        }


def as_keys(value: Any, padding_key: int | None, place: str) -> tf.Tensor:
    """Returns keys of any dtype as int64, in their shape.

    Args:
        value: a tensor, an array or a list: integers, or texts, which are hashed; see `hash_texts`.
        padding_key: what the empty text is; None: a text like any other.
        place: for errors.

    Raises:
        ValueError: it is no tensor, or of another dtype.
    """
    allowed = "a tensor of int64 (or other integers) or of texts"
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        allowed += "; bags of several lengths are tf.ragged.constant(...)"
        raise invalid("keys", value, place, allowed) from error
    if tensor.dtype == tf.string:
        keys = hash_texts(tensor)
        if padding_key is None:
            return keys
        return tf.where(tf.equal(tensor, ""), tf.constant(padding_key, tf.int64), keys)
    if not tensor.dtype.is_integer:
        raise invalid("keys", tensor.dtype.name, place, allowed)
    if tensor.dtype == tf.uint64:
        return tf.bitcast(tensor, tf.int64)
    return tf.cast(tensor, tf.int64)


def _pack_matrix(inputs: Any, specs: Sequence[FeatureSpec]) -> PackedFeatures:
    paddings = {spec.padding_key for spec in specs}
    if len(paddings) > 1 and tf.convert_to_tensor(inputs).dtype == tf.string:
        allowed = "one padding key for all features, where texts are a key matrix"
        raise invalid("padding_key", paddings, "the key matrix", allowed)
    keys = as_keys(inputs, specs[0].padding_key, "the key matrix")
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
    return PackedFeatures([keys], [], [], attrs, tuple(specs))


def _flat_weights(value: Any, keys_value: Any, place: str) -> tf.Tensor:
    kind = layout_of(keys_value)
    if layout_of(value) is not kind:
        allowed = "a dense tensor" if kind is tf.Tensor else f"a {kind.__name__}"
        raise invalid("weights", type(value).__name__, place, f"{allowed}, as the keys are")
    return tf.cast(tf.convert_to_tensor(flat_values(value)), tf.float32)


def flat_values(value: Any) -> Any:
    """Returns the values of a RaggedTensor or a SparseTensor; others as they are."""
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values
    return value.values if isinstance(value, tf.SparseTensor) else value


def layout_of(value: Any) -> type:
    """Returns the class of a RaggedTensor or SparseTensor; tf.Tensor: keys are dense."""
    kinds = (tf.RaggedTensor, tf.SparseTensor)
    return next((kind for kind in kinds if isinstance(value, kind)), tf.Tensor)


def ragged(sparse: tf.SparseTensor, place: str) -> tf.RaggedTensor:
    """Returns the values of each row of a SparseTensor [batch, width], in order.

    Raises:
        ValueError: it is of another rank.
    """
    if sparse.shape.rank != 2:
        raise invalid("keys", sparse.shape, place, "a SparseTensor [batch, width]")
    return tf.RaggedTensor.from_value_rowids(
        sparse.values, sparse.indices[:, 0], nrows=sparse.dense_shape[0]
    )


def of_specs(inputs: Mapping[str, Any], specs: Sequence[FeatureSpec], place: str) -> dict[str, Any]:
    """Returns the entries of a dictionary that are features, in order; others are left.

    Raises:
        ValueError: a feature is missing.
    """
    missing = [spec.name for spec in specs if spec.name not in inputs]
    if missing:
        given = sorted(map(str, inputs))
        near = {name: difflib.get_close_matches(name, given, 1) for name in missing}
        hints = [f"{n!r}" + (f" (not {m[0]!r}?)" if m else "") for n, m in near.items()]
        allowed = "all features of the layer, by name; missing: " + ", ".join(hints)
        raise invalid("inputs", given, place, allowed)
    return {spec.name: inputs[spec.name] for spec in specs}


def pack(
    inputs: Any, specs: Sequence[FeatureSpec], weights: Mapping[str, Any] | None = None
) -> PackedFeatures:
    """Packs the keys of a batch for the ops.

    Args:
        inputs: a matrix [batch, features] with a column per feature, in order; or a dictionary
            from feature name to keys [batch], [batch, width], or a RaggedTensor or SparseTensor
            [batch, None]; entries that are no feature are left. Keys are integers (int64; smaller
            ones are widened, uint64 keeps its bits) or texts, which are hashed.
        specs: the features, in order. Keys that equal a feature's padding key are not there.
        weights: per-key weights by feature name, float32 laid out like the keys (dictionary input
            only). Weights are constants: no gradient flows to them.

    Returns:
        The packed tensors.

    Raises:
        ValueError: a feature is missing, keys are of another dtype or rank, or weights are of no
            feature or not laid out like the keys.
    """
    weights = dict(weights or {})
    if not isinstance(inputs, Mapping):
        if weights:
            allowed = "weights with dictionary input"
            raise invalid("weights", sorted(weights), "a key matrix", allowed)
        return _pack_matrix(inputs, specs)
    inputs = of_specs(inputs, specs, "a batch")
    if unknown := sorted(set(weights) - set(inputs)):
        raise invalid("weights", unknown, "a batch", "features " + ", ".join(inputs))
    names = ("feature_keys", "feature_column", "feature_splits", "feature_weights")
    packed = PackedFeatures([], [], [], {name: [] for name in names}, tuple(specs))
    for spec in specs:
        value, place = inputs[spec.name], f"feature {spec.name!r}"
        split = weight = -1
        # No walrus: AutoGraph, which reads this in a data set's map, would warn that it cannot.
        weights_of = weights.get(spec.name)
        if weights_of is not None:
            weight = len(packed.weights)
            packed.weights.append(_flat_weights(weights_of, value, place))
        if isinstance(value, tf.SparseTensor):
            value = ragged(value, place)
        if isinstance(value, tf.RaggedTensor):
            if value.ragged_rank != 1 or value.flat_values.shape.rank != 1:
                raise invalid("keys", value.shape, place, "one ragged dimension: [batch, None]")
            split = len(packed.row_splits)
            packed.row_splits.append(tf.cast(value.row_splits, tf.int64))
            keys = as_keys(value.flat_values, spec.padding_key, place)
        else:
            keys = as_keys(value, spec.padding_key, place)
            if keys.shape.rank not in (1, 2):
                allowed = "[batch], [batch, width] or a RaggedTensor [batch, None]"
                raise invalid("keys", keys.shape, place, allowed)
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


def num_rows(component: Any) -> tf.Tensor:
    """Returns the rows of a dense tensor, RaggedTensor or SparseTensor, int64 []."""
    if isinstance(component, tf.SparseTensor):
        return component.dense_shape[0]
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(out_type=tf.int64)
    return tf.shape(component, out_type=tf.int64)[0]
