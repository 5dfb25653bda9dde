"""A small click model and its data for Keras contract tests."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from slipstream_tf import Table, optimizers
from slipstream_tf.keras import EmbeddingCollection

TABLES = ("user", "item")


def make_layer(rule: Any = None, dim: int = 4, name: str = "tables", **kwargs: Any) -> Any:
    """Returns an embedding layer with a table per name in TABLES."""
    tables = [Table(table, dim) for table in TABLES]
    return EmbeddingCollection(tables, rule or optimizers.Adagrad(0.5), name=name, **kwargs)


def make_model(optimizer: Any = "sgd", layer: Any = None, **kwargs: Any) -> keras.Model:
    """Returns a compiled model with a key per table, always the same."""
    keras.utils.set_random_seed(3)
    keys = keras.Input((len(TABLES),), dtype="int64", name="keys")
    rows = keras.layers.Flatten()((layer or make_layer())(keys))
    model = keras.Model(keys, keras.layers.Dense(1, activation="sigmoid", name="top")(rows))
    model.compile(optimizer, "binary_crossentropy", **kwargs)
    return model


def data(examples: int = 64, keys: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys [examples, tables] and labels [examples] from a fixed seed.

    Keys are int64 and labels float32.
    """
    matrix = np.random.default_rng(5).integers(0, keys, (examples, len(TABLES)))
    return matrix, (matrix.sum(axis=1) % 2).astype(np.float32)


def layer_of(model: Any) -> Any:
    """Returns the model's embedding layer."""
    (layer,) = (part for part in model.layers if isinstance(part, EmbeddingCollection))
    return layer


def contents(model: Any) -> dict[str, np.ndarray]:
    """Returns copies of all keys, rows, slots and dense weights."""
    layer = model if isinstance(model, EmbeddingCollection) else layer_of(model)
    found = {}
    for table in layer.tables:
        exported = layer.store.export_table(table.name)
        found |= {f"{table.name} {part}": exported[part] for part in ("keys", "rows", "slots")}
    if layer is not model:
        dense = [weight for weight in model.trainable_weights if "anchor" not in weight.path]
        found |= {weight.path: np.array(weight) for weight in dense}
    return found


def assert_same(model: Any, expected: dict[str, np.ndarray]) -> None:
    """Asserts that rows, slots and dense weights are equal bit for bit."""
    now = contents(model)
    assert set(now) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(now[name], array, err_msg=name)


def differ(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> set[str]:
    """Returns the names of the arrays that differ in any bit."""
    return {name for name in one if not np.array_equal(one[name], other[name])}
