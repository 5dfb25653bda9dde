"""Validates the features of a layer and converts their layouts for Keras."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_choice, require_integer
from slipstream_tf.config import COMBINERS, Table
from slipstream_tf.export.serving import pooled
from slipstream_tf.ops.features import (
    DECLARE_DTYPE,
    PADDING_KEY,
    FeatureSpec,
    PackedFeatures,
    flat_values,
    of_specs,
    with_flat_values,
)

_LAYER = "EmbeddingCollection"


def resolve_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """Validates the tables of a layer.

    Args:
        tables: At least one table, with unique names.

    Returns:
        The tables as a tuple.

    Raises:
        ValueError: There is no table, an element is not a `Table`, or a name is repeated.
    """
    given = tuple(tables) if isinstance(tables, Iterable) else (tables,)
    wrong = [table for table in given if not isinstance(table, Table)]
    if wrong or not given:
        raise invalid("tables", wrong or tables, _LAYER, "at least one slipstream_tf.Table")
    names = [table.name for table in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise invalid("tables", twice, _LAYER, "a unique name for each table")
    return given


def resolve_features(
    features: Any,
    tables: Sequence[Table],
    padding_key: int | None = PADDING_KEY,
    place: str = _LAYER,
) -> tuple[FeatureSpec, ...]:
    """Converts the argument `features` of `EmbeddingCollection` to specs.

    Args:
        features: None (one feature per table, with its name and combiner), a dictionary from
            feature name to table name (with the combiner of the table), or a sequence of
            `FeatureSpec`s.
        tables: The tables of the layer.
        padding_key: Padding key of features that are not given as `FeatureSpec`.
        place: Class with the argument, for errors.

    Returns:
        One spec per feature, in order.

    Raises:
        ValueError: A table is unknown, a feature is repeated, the argument has another type, or
            `padding_key` is given in addition to `FeatureSpec`s.
    """
    by_name = {table.name: table for table in tables}
    if features is None:
        features = {name: name for name in by_name}
    if isinstance(features, Mapping):
        for name, table in features.items():
            _require_table(name, table, by_name)
        tables_of = {name: by_name[table] for name, table in features.items()}
        specs = [FeatureSpec(n, t.name, t.combiner, padding_key) for n, t in tables_of.items()]
    else:
        specs = list(features) if isinstance(features, Sequence) else [features]
        if padding_key != PADDING_KEY:
            allowed = f"the default {PADDING_KEY}. Pass FeatureSpec(..., padding_key={padding_key})"
            raise invalid("padding_key", padding_key, f"{place} with FeatureSpecs", allowed)
    wrong = [spec for spec in specs if not isinstance(spec, FeatureSpec)]
    if wrong or not specs:
        allowed = "None, a dictionary {feature name: table name}, or a sequence of FeatureSpec"
        raise invalid("features", wrong or features, place, allowed)
    names = [spec.name for spec in specs]
    for spec in specs:
        if not isinstance(spec.name, str) or not spec.name:
            raise invalid("features", spec.name, place, "non-empty strings as feature names")
        if names.count(spec.name) > 1:
            raise invalid("features", spec.name, place, "a unique name for each feature")
        _require_table(spec.name, spec.table, by_name)
        require_choice("combiner", spec.combiner, COMBINERS, f"feature {spec.name!r}")
        if spec.padding_key is not None:
            bounds = (-(1 << 63), (1 << 63) - 1)
            require_integer("padding_key", spec.padding_key, *bounds, f"feature {spec.name!r}")
    return tuple(specs)


def _require_table(feature: str, table: Any, by_name: Mapping[str, Table]) -> None:
    if table not in by_name:
        allowed = "one of the tables " + ", ".join(repr(name) for name in by_name)
        raise invalid("table", table, f"feature {feature!r}", allowed)


MATRIX = "the key matrix"


def as_inputs(inputs: Any, specs: Sequence[FeatureSpec], place: str) -> Any:
    """Converts the inputs of a call to tensors and selects the features.

    Args:
        inputs: A dictionary from feature name to keys, or a key matrix [batch, features]. Entries
            of a dictionary that are not features are dropped.
        specs: The features.
        place: Name of the layer, for errors.

    Returns:
        A dictionary from feature name to tensor, or the key matrix as a tensor.

    Raises:
        ValueError: A feature is missing, or a list cannot be converted to a tensor.
    """
    if not isinstance(inputs, Mapping):
        return as_tensor(inputs, f"{MATRIX} of {place}")
    chosen = of_specs(inputs, specs, place)
    return {
        name: as_tensor(value, f"feature {name!r} of {place}") for name, value in chosen.items()
    }


def as_tensor(value: Any, place: str) -> Any:
    """Converts an array or a list of keys to a tensor.

    Args:
        value: The keys. Tensors are returned unchanged, except for float placeholders of Keras,
            which are cast to int64. Keys that Keras rounded raise an error when the graph runs.
        place: Name of the keys, for errors.

    Raises:
        ValueError: The list contains tensors or lists of different lengths, or Keras cast texts.
    """
    if isinstance(value, (list, tuple)):
        if any(hasattr(part, "shape") and len(part.shape) for part in value):
            allowed = (
                "one tensor of keys. For multiple features, pass a dictionary {feature: keys} to "
                "an EmbeddingCollection"
            )
            raise invalid("inputs", f"a list of {len(value)} tensors", place, allowed)
        try:
            value = np.asarray(value)
        except ValueError as error:
            allowed = "lists of equal length. Otherwise pass tf.ragged.constant(keys)"
            raise invalid("keys", value, place, allowed) from error
        if value.size == 0:
            value = value.astype(np.int64)  # NumPy converts an empty list to floats.
    if isinstance(value, (np.ndarray, np.generic)):
        value = tf.convert_to_tensor(value)
    if tf.executing_eagerly() or not tf.is_tensor(value):
        return value
    if value.dtype.is_floating:
        return _exact_integers(value, place) if _compat.declares_inputs() else value
    return _unrounded(value, place)


def _exact_integers(keys: Any, place: str) -> Any:
    """Casts float keys to int64, with an assertion that they are exact integers."""
    floats = flat_values(keys)
    integers = tf.cast(floats, tf.int64)
    is_exact = tf.equal(tf.cast(integers, floats.dtype), floats)
    # From 2**24, a float32 can be the rounded value of another integer, and x + 1 is equal to x.
    is_exact &= tf.not_equal(tf.abs(floats) + 1, tf.abs(floats))
    return with_flat_values(keys, _if_exact(integers, is_exact, floats.dtype, place))


def _unrounded(keys: Any, place: str) -> Any:
    """Asserts that Keras did not round integers, if it cast them to floats and back.

    For example, an outer Sequential model without an Input casts the keys of an inner one.
    """
    integers, rounded = flat_values(keys), None
    source = integers
    while tf.is_symbolic_tensor(source) and source.op.type == "Cast":
        (source,) = source.op.inputs
        rounded = source.dtype if source.dtype.is_floating else rounded
    if source.dtype == tf.string and integers.dtype != tf.string:
        raise invalid("dtype", integers.dtype.name, f"text keys of {place}", DECLARE_DTYPE)
    if rounded is None or source.dtype.is_floating:
        return keys
    is_exact = tf.equal(tf.cast(source, integers.dtype), integers)
    return with_flat_values(keys, _if_exact(integers, is_exact, rounded, place))


def _if_exact(integers: tf.Tensor, is_exact: tf.Tensor, dtype: tf.DType, place: str) -> tf.Tensor:
    allowed = f"integers that {dtype.name} represents exactly. Declare {DECLARE_DTYPE}"
    message = str(invalid("keys", f"rounded {dtype.name}", place, allowed))
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_exact), [message])]):
        return tf.identity(integers)


def require_layout(inputs: Any, specs: Sequence[FeatureSpec], place: str) -> None:
    """Validates symbolic inputs (`keras.KerasTensor`s) of a layer.

    Args:
        inputs: A dictionary from feature name to keys, or a key matrix.
        specs: The features.
        place: Name of the layer, for errors.

    Raises:
        ValueError: A feature is missing, or keys have the wrong dtype or rank.
    """
    if isinstance(inputs, Mapping):
        given = of_specs(inputs, specs, place)
    else:
        given = {MATRIX: inputs}
        if len(inputs.shape) != 2 or inputs.shape[1] not in (None, len(specs)):
            names = [spec.name for spec in specs]
            allowed = f"shape [batch, {len(specs)}] with one column per feature: {names}"
            raise invalid("keys", tuple(inputs.shape), place, allowed)
    for name, tensor in given.items():
        require_dtype(tensor, f"{name if name == MATRIX else f'feature {name!r}'} of {place}")


def require_dtype(keys: Any, place: str) -> None:
    """Validates the dtype of symbolic keys.

    Args:
        keys: A `keras.KerasTensor`.
        place: Name of the keys, for the error.

    Raises:
        ValueError: The keys are a `keras.Input` of neither integers nor texts. Other symbolic keys
            may be floats, because Keras uses float32 if it knows only the shape.
    """
    dtype = keras.backend.standardize_dtype(keys.dtype)
    is_allowed = dtype == "string" or dtype.lstrip("u").startswith("int")
    if not is_allowed and _compat.is_model_input(keys):
        allowed = "an integer dtype or 'string', for example keras.Input(..., dtype='int64')"
        raise invalid("dtype", dtype, place, allowed)


def output_shape(spec: FeatureSpec, shape: Sequence[int | None], dim: int) -> tuple[Any, ...]:
    """Returns the output shape of a feature.

    Args:
        spec: The feature.
        shape: Shape of its keys, with None for unknown sizes.
        dim: Dimension of its table.

    Returns:
        (batch, dim) with a combiner, else `shape` followed by `dim`.
    """
    return (*(shape if spec.combiner is None else shape[:1]), dim)


def output_spec(spec: FeatureSpec, keys: Any, dim: int, dtype: str) -> Any:
    """Returns the output of a feature as a `keras.KerasTensor`.

    Args:
        spec: The feature.
        keys: Its symbolic keys.
        dim: Dimension of its table.
        dtype: Dtype of the output.
    """
    shape = output_shape(spec, keys.shape, dim)
    if spec.combiner is not None or not _is_ragged(keys):
        return keras.KerasTensor(shape, dtype=dtype)
    # The declared width of sparse keys is not the number of keys of any row.
    return keras.KerasTensor((shape[0], None, *shape[2:]), dtype=dtype, ragged=True)


def _is_ragged(keys: Any) -> bool:
    """Returns whether keys, which may be symbolic, are ragged or sparse."""
    if isinstance(keys, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return getattr(keys, "ragged", False) or getattr(keys, "sparse", False)


def sequences(rows: tf.Tensor, packed: PackedFeatures, feature: int) -> Any:
    """Reshapes the rows of a feature to the layout of its keys.

    Args:
        rows: The row of each key of the feature, including padding, [keys, dim].
        packed: The keys of all features.
        feature: Index of the feature in `packed`. It has no combiner.

    Returns:
        The rows as [batch, dim] or [batch, width, dim], or a RaggedTensor [batch, None, dim].
    """
    keys, row_splits, _ = packed.of(feature)
    if row_splits is not None:
        return tf.RaggedTensor.from_row_splits(rows, row_splits, validate=False)
    if keys.shape.rank == 1:
        return rows
    return tf.reshape(rows, tf.concat([tf.shape(keys), rows.shape[1:]], 0))


def mask_of(spec: FeatureSpec, keys: Any, min_rank: int = 0) -> Any:
    """Returns the Keras mask of the output of a feature.

    Args:
        spec: The feature.
        keys: Its keys: a tensor, an array, a list or a `keras.KerasTensor`.
        min_rank: Minimum rank of the keys.

    Returns:
        Bool tensor in the shape of the keys, False at the padding; a `keras.KerasTensor` for
        symbolic keys. None if the feature is pooled or has no padding key, or if its keys are
        ragged, sparse or of a lower rank.
    """
    keys = as_tensor(keys, f"feature {spec.name!r}")
    is_padded = spec.combiner is None and spec.padding_key is not None
    if not is_padded or _is_ragged(keys) or len(keys.shape) < min_rank:
        return None
    if isinstance(keys, keras.KerasTensor):
        if keys.dtype == "string":
            return keras.ops.not_equal(keys, "")
        return keras.ops.not_equal(keras.ops.cast(keys, "int64"), spec.padding_key)
    if keys.dtype == tf.string:
        return tf.not_equal(keys, "")
    keys = tf.bitcast(keys, tf.int64) if keys.dtype == tf.uint64 else tf.cast(keys, tf.int64)
    return tf.not_equal(keys, spec.padding_key)


def zero_rows(
    packed: PackedFeatures, dims: Mapping[str, int], stacked: bool
) -> Sequence[tf.Tensor]:
    """Returns zeros in the shapes of the rows that a lookup returns.

    Args:
        packed: The keys of all features.
        dims: Dimensions of the tables by name.
        stacked: Whether to return one tensor instead of one tensor per feature.
    """
    rows = []
    for index, spec in enumerate(packed.specs):
        dim = dims[spec.table]
        zeros = lambda keys, dim=dim: tf.zeros([tf.size(keys), dim])  # noqa: E731
        rows.append(pooled(packed, index, spec.combiner, zeros))
    return [tf.stack(rows, axis=1)] if stacked else rows
