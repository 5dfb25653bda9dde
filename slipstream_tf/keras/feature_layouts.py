"""Features of a layer: their specs from the user's arguments, and their layouts in Keras."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_choice, require_integer
from slipstream_tf.config import COMBINERS, Table
from slipstream_tf.ops.features import PADDING_KEY, FeatureSpec, PackedFeatures, of_specs

_LAYER = "EmbeddingCollection"


def resolve_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """Checks the tables of one layer.

    Args:
        tables: one table or more, with different names.

    Returns:
        The tables as a tuple.

    Raises:
        ValueError: there is none, one is no Table, or a name comes twice.
    """
    given = tuple(tables) if isinstance(tables, Iterable) else (tables,)
    wrong = [table for table in given if not isinstance(table, Table)]
    if wrong or not given:
        raise invalid("tables", wrong or tables, _LAYER, "one slipstream_tf.Table or more")
    names = [table.name for table in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise invalid("tables", twice, _LAYER, "tables with different names")
    return given


def resolve_features(
    features: Any, tables: Sequence[Table], padding_key: int | None = PADDING_KEY
) -> tuple[FeatureSpec, ...]:
    """Turns the `features` argument of `EmbeddingCollection` into specs.

    Args:
        features: None (a feature per table, of its name and combiner), a dictionary from feature
            name to table name (the table's combiner), or a sequence of FeatureSpec (its own
            combiner).
        tables: the tables that features may name.
        padding_key: of features that are no FeatureSpec.

    Returns:
        One spec per feature, in order.

    Raises:
        ValueError: a table is unknown, a feature comes twice, or the argument is something else.
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
            allowed = "left out: each FeatureSpec has its own"
            raise invalid("padding_key", padding_key, f"{_LAYER} with features=", allowed)
    wrong = [spec for spec in specs if not isinstance(spec, FeatureSpec)]
    if wrong or not specs:
        allowed = "None, a dictionary from feature name to table name, or a sequence of FeatureSpec"
        raise invalid("features", wrong or features, _LAYER, allowed)
    names = [spec.name for spec in specs]
    for spec in specs:
        if not isinstance(spec.name, str) or not spec.name:
            raise invalid("features", spec.name, _LAYER, "non-empty names")
        if names.count(spec.name) > 1:
            raise invalid("features", spec.name, _LAYER, "each feature once")
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


class FloatKeysError(ValueError, NotImplementedError):
    """Symbolic keys are floats.

    A Sequential model without an Input makes such inputs of anything. It takes a
    NotImplementedError for a shape that it cannot know, and then passes its inputs on as they are.
    """


def as_inputs(inputs: Any, specs: Sequence[FeatureSpec], place: str) -> Any:
    """Returns a call's inputs as Keras may see them: tensors, of the features alone.

    Args:
        inputs: of the call; entries of a dictionary that are no feature are left.
        specs: the features.
        place: for errors.

    Raises:
        ValueError: a feature is missing, or a list is no tensor.
    """
    if not isinstance(inputs, Mapping):
        return as_tensor(inputs, f"{MATRIX} of {place}")
    chosen = of_specs(inputs, specs, place)
    return {
        name: as_tensor(value, f"feature {name!r} of {place}") for name, value in chosen.items()
    }


def as_tensor(value: Any, place: str) -> Any:
    """Returns an array or a list of keys as a tensor; what is a tensor stays.

    Raises:
        ValueError: a list is of tensors, or of lists of several lengths.
    """
    if isinstance(value, (list, tuple)):
        if any(hasattr(part, "shape") and len(part.shape) for part in value):
            allowed = "a dictionary {feature: keys}, or one key matrix [batch, features]"
            raise invalid("inputs", f"a list of {len(value)} tensors", place, allowed)
        try:
            value = np.asarray(value)
        except ValueError as error:
            allowed = "lists of one length; bags of several lengths are tf.ragged.constant(...)"
            raise invalid("keys", value, place, allowed) from error
        if value.size == 0:
            value = value.astype(np.int64)  # NumPy takes no values for floats.
    return tf.convert_to_tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value


def require_layout(inputs: Any, specs: Sequence[FeatureSpec], place: str) -> None:
    """Checks symbolic inputs.

    Raises:
        ValueError: a feature is missing, or keys are of another dtype or rank.
    """
    if isinstance(inputs, Mapping):
        given = of_specs(inputs, specs, place)
    else:
        given = {MATRIX: inputs}
        if len(inputs.shape) != 2 or inputs.shape[1] not in (None, len(specs)):
            allowed = f"[batch, {len(specs)}], a column per feature: {[s.name for s in specs]}"
            raise invalid("keys", tuple(inputs.shape), place, allowed)
    for name, tensor in given.items():
        require_dtype(tensor, f"{name if name == MATRIX else f'feature {name!r}'} of {place}")


def require_dtype(keys: Any, place: str) -> None:
    """Checks the dtype of symbolic keys.

    Raises:
        FloatKeysError: they are neither integers nor texts.
    """
    dtype = keras.backend.standardize_dtype(keys.dtype)
    if dtype != "string" and not dtype.lstrip("u").startswith("int"):
        allowed = "keras.Input(..., dtype='int64') or another of integers or of texts ('string')"
        raise FloatKeysError(str(invalid("dtype", dtype, place, allowed)))


def output_shape(spec: FeatureSpec, shape: Sequence[int | None], dim: int) -> tuple[Any, ...]:
    """Returns the shape of a feature's output, for that of its keys."""
    return (*(shape if spec.combiner is None else shape[:1]), dim)


def output_spec(spec: FeatureSpec, keys: Any, dim: int, dtype: str) -> Any:
    """Returns a feature's output as a `keras.KerasTensor`, for that of its keys."""
    shape = output_shape(spec, keys.shape, dim)
    is_ragged = getattr(keys, "ragged", False) or getattr(keys, "sparse", False)
    ragged = {"ragged": True} if is_ragged and spec.combiner is None else {}
    return keras.KerasTensor(shape, dtype=dtype, **ragged)


def sequences(rows: tf.Tensor, packed: PackedFeatures, feature: int) -> Any:
    """Gives the rows of a feature's keys the layout of the keys.

    Args:
        rows: [keys, dim], padding included.
        packed: the keys.
        feature: index of the feature, which has no combiner.

    Returns:
        [batch, dim] or [batch, width, dim], or a RaggedTensor [batch, None, dim].
    """
    keys, row_splits, _ = packed.of(feature)
    if row_splits is not None:
        return tf.RaggedTensor.from_row_splits(rows, row_splits, validate=False)
    if keys.shape.rank == 1:
        return rows
    return tf.reshape(rows, tf.concat([tf.shape(keys), rows.shape[1:]], 0))


def mask_of(spec: FeatureSpec, keys: Any) -> Any:
    """Returns Keras's mask of a feature's output: which keys are there, bool in their shape.

    Returns:
        None: the feature is pooled, has no padding key, or its output tells its own lengths.
    """
    is_padded = spec.combiner is None and spec.padding_key is not None
    if not is_padded or isinstance(keys, (tf.RaggedTensor, tf.SparseTensor)):
        return None
    if len(keys.shape) < 2 or isinstance(keys, keras.KerasTensor):
        return None
    if keys.dtype == tf.string:
        return tf.not_equal(keys, "")
    keys = tf.bitcast(keys, tf.int64) if keys.dtype == tf.uint64 else tf.cast(keys, tf.int64)
    return tf.not_equal(keys, spec.padding_key)
