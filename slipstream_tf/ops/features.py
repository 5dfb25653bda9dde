"""The common input format of lookups and classification.

`pack` converts the keys of a batch into `PackedFeatures`, the tensors and attributes that the ops
take. Users pass a matrix with one column per feature, or a dictionary of dense, padded, ragged or
sparse keys. Keys are integers or strings.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.keys import PADDING_KEY as PADDING_KEY
from slipstream_tf._utils.serialization import Serializable
from slipstream_tf.ops.text_keys import hash_texts

# The correct declaration of keys, for errors about their dtype.
DECLARE_DTYPE = (
    "keras.Input(..., dtype='int64') or 'string' as the inputs of Keras models, or pass "
    "`input_signature` to `export` of a subclassed model"
)


@dataclasses.dataclass(frozen=True)
class FeatureSpec(Serializable):
    """Describes a feature: named keys that are looked up in a table.

    Example:

    >>> slip.FeatureSpec("user", table="users").combiner
    'sum'

    Args:
        name: Name of the feature in the input dictionary.
        table: Name of its table. Multiple features may share a table.
        combiner: "sum", "mean" or "sqrtn" for bags. None returns the row of each key without
            pooling.
        padding_key: Key that marks padding, in every layout of keys. For strings, the empty string
            is padding. None disables padding. Defaults to -1.
    """

    name: str
    table: str
    combiner: str | None = "sum"
    padding_key: int | None = PADDING_KEY


@dataclasses.dataclass(frozen=True)
class PackedFeatures:
    """Tensors and attributes of the common inputs of the ops.

    Attributes:
        keys: int64 tensors [batch], [batch, width], or flat [total] with row splits.
        row_splits: int64 tensors [batch + 1].
        weights: float32 tensors, each with the shape of the keys that it belongs to.
        attrs: Lists of int by attribute, with one entry per feature, where -1 means none.
            feature_keys: index of its tensor in `keys`. feature_column: its column, if the tensor
            is a matrix of all features. feature_splits: index in `row_splits`. feature_weights:
            index in `weights`.
        specs: The features, in order.
    """

    keys: list[tf.Tensor]
    row_splits: list[tf.Tensor]
    weights: list[tf.Tensor]
    attrs: dict[str, list[int]]
    specs: tuple[FeatureSpec, ...]

    def of(self, feature: int) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Returns the keys, row splits and weights of a feature.

        Args:
            feature: Position of the feature.

        Returns:
            Keys int64 [batch], [batch, width] or flat with row splits; row splits or None; and
            weights or None.
        """
        tensor, column, split, weight = (indices[feature] for indices in self.attrs.values())
        return (
            self.keys[tensor] if column < 0 else self.keys[tensor][:, column],
            self.row_splits[split] if split >= 0 else None,
            self.weights[weight] if weight >= 0 else None,
        )

    def is_key(self, feature: int) -> tf.Tensor | None:
        """Returns which keys of a feature are not padding.

        Args:
            feature: Position of the feature.

        Returns:
            bool in the shape of the keys, or None if the feature has no padding.
        """
        padding_key = self.specs[feature].padding_key
        if padding_key is None:
            return None
        return tf.not_equal(self.of(feature)[0], tf.constant(padding_key, tf.int64))

    @property
    def batch_size(self) -> int | None:
        """The static number of examples, or None if it is unknown."""
        pairs = zip(self.attrs["feature_keys"], self.attrs["feature_splits"], strict=True)
        for tensor, split in pairs:
            size = self.keys[tensor].shape[0] if split < 0 else self.row_splits[split].shape[0]
            if size is not None:
                return size if split < 0 else size - 1
        return None

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments for an op that takes features."""
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
    """Returns integer or string keys as int64, in the same shape.

    Args:
        value: A tensor, array or list of integers or strings. Strings are hashed; see `hash_texts`.
        padding_key: Key for the empty string, or None to hash the empty string as any other string.
        place: Name for error messages.

    Raises:
        ValueError: The value cannot be converted to a tensor, or its dtype is neither integer nor
            string.
    """
    allowed = "a tensor of integers or strings"
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        allowed += ". Use tf.ragged.constant(...) for bags of different lengths"
        raise invalid("keys", value, place, allowed) from error
    if tensor.dtype == tf.string:
        keys = hash_texts(tensor)
        if padding_key is None:
            return keys
        return tf.where(tf.equal(tensor, ""), tf.constant(padding_key, tf.int64), keys)
    if not tensor.dtype.is_integer:
        allowed = f"{allowed}. Declare {DECLARE_DTYPE}"
        raise invalid("keys", tensor.dtype.name, place, allowed)
    if tensor.dtype == tf.uint64:
        return tf.bitcast(tensor, tf.int64)
    return tf.cast(tensor, tf.int64)


def _pack_matrix(inputs: Any, specs: Sequence[FeatureSpec]) -> PackedFeatures:
    paddings = {spec.padding_key for spec in specs}
    if len(paddings) > 1 and tf.convert_to_tensor(inputs).dtype == tf.string:
        allowed = (
            "one padding key for all features, because the keys are strings. Pass a dictionary of "
            "features to use different padding keys"
        )
        raise invalid("padding_key", paddings, "the key matrix", allowed)
    keys = as_keys(inputs, specs[0].padding_key, "the key matrix")
    count = len(specs)
    if keys.shape.rank != 2 or keys.shape[1] not in (None, count):
        names = ", ".join(spec.name for spec in specs)
        allowed = f"a shape [batch, {count}] with one column per feature: {names}"
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
    """Returns the weights of a feature, float32 in the order of the keys.

    Raises:
        ValueError: The weights have another layout than the keys.
        tf.errors.InvalidArgumentError: The rows of ragged weights, or the indices of sparse
            weights, differ from the rows or indices of the keys.
    """
    kind = layout_of(keys_value)
    if layout_of(value) is not kind:
        allowed = "a dense tensor" if kind is tf.Tensor else f"a {kind.__name__}"
        raise invalid("weights", type(value).__name__, place, f"{allowed}, like the keys")
    weights = tf.cast(tf.convert_to_tensor(flat_values(value)), tf.float32)
    checks = []
    for part in {tf.RaggedTensor: ["row_splits"], tf.SparseTensor: ["indices"]}.get(kind, []):
        given, expected = getattr(value, part), getattr(keys_value, part)
        if given is not expected:  # The same object after `keys.with_values(weights)`.
            is_equal = tf.raw_ops.Equal(
                x=tf.cast(given, tf.int64),
                y=tf.cast(expected, tf.int64),
                incompatible_shape_error=False,
            )
            allowed = f"the {part} of the keys. Create the weights by keys.with_values(...)"
            message = str(invalid("weights", f"different {part}", place, allowed))
            checks.append(tf.debugging.assert_equal(tf.reduce_all(is_equal), True, message))
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(weights) if checks else weights


def flat_values(value: Any) -> Any:
    """Returns the values of a RaggedTensor or SparseTensor, or the value itself."""
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values
    return value.values if isinstance(value, tf.SparseTensor) else value


def with_flat_values(value: Any, values: tf.Tensor) -> Any:
    """Returns `values` in the layout of a RaggedTensor, a SparseTensor or a dense tensor."""
    if isinstance(value, tf.RaggedTensor):
        return value.with_flat_values(values)
    return value.with_values(values) if isinstance(value, tf.SparseTensor) else values


def layout_of(value: Any) -> type:
    """Returns tf.RaggedTensor, tf.SparseTensor, or tf.Tensor for dense keys."""
    kinds = (tf.RaggedTensor, tf.SparseTensor)
    return next((kind for kind in kinds if isinstance(value, kind)), tf.Tensor)


def ragged(sparse: tf.SparseTensor, place: str) -> tf.RaggedTensor:
    """Returns the rows of a SparseTensor [batch, width] as a RaggedTensor.

    Raises:
        ValueError: The SparseTensor has another rank.
    """
    if sparse.shape.rank != 2:
        raise invalid("keys", sparse.shape, place, "a SparseTensor of shape [batch, width]")
    # A constant keeps the static batch size of the outputs.
    batch = sparse.dense_shape[0] if sparse.shape[0] is None else sparse.shape[0]
    return tf.RaggedTensor.from_value_rowids(sparse.values, sparse.indices[:, 0], nrows=batch)


def of_specs(inputs: Mapping[str, Any], specs: Sequence[FeatureSpec], place: str) -> dict[str, Any]:
    """Returns the features of a dictionary, in the order of `specs`.

    Args:
        inputs: A dictionary. Entries that are not features are ignored.
        specs: The features.
        place: Name for error messages.

    Raises:
        ValueError: A feature is missing.
    """
    missing = [spec.name for spec in specs if spec.name not in inputs]
    if missing:
        raise _missing(missing, inputs, place)
    return {spec.name: inputs[spec.name] for spec in specs}


# Minimum similarity of a misspelled name to the right one: one wrong character in seven.
_SIMILARITY = 0.85


def given_specs(
    inputs: Mapping[str, Any], specs: Sequence[FeatureSpec], place: str
) -> tuple[FeatureSpec, ...]:
    """Returns the specs of the features that a dictionary contains, in order.

    Args:
        inputs: A dictionary. Entries that are not features are ignored.
        specs: The features.
        place: Name for error messages.

    Raises:
        ValueError: There is no feature, or an entry that is not a feature has nearly the name of a
            feature that is missing.
    """
    given = tuple(spec for spec in specs if spec.name in inputs)
    if len(given) == len(specs):
        return given
    missing = [spec.name for spec in specs if spec.name not in inputs]
    others = set(map(str, inputs)) - {spec.name for spec in given}
    misspelled = [name for name in missing if any(_are_similar(name, other) for other in others)]
    if misspelled or not given:
        raise _missing(misspelled or missing, inputs, place)
    return given


def _are_similar(name: str, other: str) -> bool:
    matcher = difflib.SequenceMatcher(None, name.casefold(), other.casefold())
    return matcher.ratio() >= _SIMILARITY


def _missing(missing: Sequence[str], inputs: Mapping[str, Any], place: str) -> ValueError:
    given = sorted(map(str, inputs))
    near = {name: difflib.get_close_matches(name, given, 1) for name in missing}
    hints = [f"{n!r}" + (f" (not {m[0]!r}?)" if m else "") for n, m in near.items()]
    allowed = "the features of the layer by name. Add the missing features: " + ", ".join(hints)
    return invalid("inputs", given, place, allowed)


def pack(
    inputs: Any, specs: Sequence[FeatureSpec], weights: Mapping[str, Any] | None = None
) -> PackedFeatures:
    """Packs the keys of a batch for the ops.

    Args:
        inputs: A matrix [batch, features] with one column per feature, in order; or a dictionary
            from feature name to keys [batch], [batch, width], or a RaggedTensor or SparseTensor
            [batch, None]. Entries that are not features are ignored. Keys are integers or strings.
            Smaller integers are cast to int64, the bits of uint64 are kept, and strings are hashed.
        specs: The features, in order. Keys that equal the padding key of their feature are ignored.
        weights: Weights per key by feature name, float32 in the layout of the keys. Requires
            dictionary input. Weights are constants: they receive no gradient.

    Returns:
        The packed tensors.

    Raises:
        ValueError: A feature is missing, keys have an unsupported dtype or rank, or weights do not
            belong to a feature or do not have the layout of the keys.
        tf.errors.InvalidArgumentError: Ragged or sparse weights are in other rows than the keys.
    """
    weights = dict(weights or {})
    if not isinstance(inputs, Mapping):
        if weights:
            allowed = "None. Pass a dictionary of features to use weights"
            raise invalid("weights", sorted(weights), "a key matrix", allowed)
        return _pack_matrix(inputs, specs)
    inputs = of_specs(inputs, specs, "a batch")
    if unknown := sorted(set(weights) - set(inputs)):
        raise invalid("weights", unknown, "a batch", "names of features: " + ", ".join(inputs))
    names = ("feature_keys", "feature_column", "feature_splits", "feature_weights")
    packed = PackedFeatures([], [], [], {name: [] for name in names}, tuple(specs))
    for spec in specs:
        value, place = inputs[spec.name], f"feature {spec.name!r}"
        split = weight = -1
        # No assignment expression, because AutoGraph does not support it and would log a warning.
        weights_of = weights.get(spec.name)
        if weights_of is not None:
            weight = len(packed.weights)
            packed.weights.append(_flat_weights(weights_of, value, place))
        if isinstance(value, tf.SparseTensor):
            value = ragged(value, place)
        if isinstance(value, tf.RaggedTensor):
            if value.ragged_rank != 1 or value.flat_values.shape.rank != 1:
                allowed = "a RaggedTensor [batch, None] with one ragged dimension"
                raise invalid("keys", value.shape, place, allowed)
            split = len(packed.row_splits)
            packed.row_splits.append(tf.cast(value.row_splits, tf.int64))
            keys = as_keys(value.flat_values, spec.padding_key, place)
        else:
            keys = as_keys(value, spec.padding_key, place)
            if keys.shape.rank not in (1, 2):
                allowed = "a shape [batch] or [batch, width], or a RaggedTensor [batch, None]"
                raise invalid("keys", keys.shape, place, allowed)
        for name, index in zip(packed.attrs, (len(packed.keys), -1, split, weight), strict=True):
            packed.attrs[name].append(index)
        packed.keys.append(keys)
    return packed


def table_names(tables: Sequence[str], place: str) -> tuple[str, ...]:
    """Returns the validated names of a classifier's tables.

    Raises:
        ValueError: There is no name, or a name occurs twice.
    """
    tables = tuple(tables)
    if not tables or len(set(tables)) != len(tables):
        raise invalid("tables", tables, place, "at least one name, without duplicates")
    return tables


def table_indices(
    specs: Sequence[FeatureSpec], tables: Sequence[str], ignored_tables: Set[str], ignored: int
) -> list[int]:
    """Returns the table index of each feature.

    Args:
        specs: The features.
        tables: Names of the tables.
        ignored_tables: Names of tables that are ignored.
        ignored: Index for the features of ignored tables.

    Raises:
        ValueError: The table of a feature is in neither list.
    """
    indices = []
    for spec in specs:
        if spec.table in ignored_tables:
            indices.append(ignored)
        elif spec.table in tables:
            indices.append(tables.index(spec.table))
        else:
            allowed = "one of the tables of the classifier: " + ", ".join(tables)
            raise invalid("table", spec.table, f"feature {spec.name!r}", allowed)
    return indices


def num_rows(component: Any) -> tf.Tensor:
    """Returns the number of rows of a tensor, int64 [].

    Args:
        component: A dense tensor, RaggedTensor or SparseTensor.
    """
    if isinstance(component, tf.SparseTensor):
        return component.dense_shape[0]
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(out_type=tf.int64)
    return tf.shape(component, out_type=tf.int64)[0]
