"""A small click model and its data for Keras contract tests."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import FeatureSpec, Table, optimizers
from slipstream_tf.keras import Embedding, EmbeddingCollection

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


COUNTRIES = ["at", "ch", "de"]
# Keys of each feature, as tensors of the dtypes and layouts that the models accept.
FEATURES = {
    "user": tf.constant([1, 2, 3, 1], tf.int64),
    "seen": tf.constant([[4, 5, 6], [1, 1, 2], [0, 3, 7], [6, 6, 6]], tf.int64),
    "tags": tf.ragged.constant([[1], [2, 3], [], [3, 3, 3]], dtype=tf.int64),
    "country": tf.constant(["at", "de", "ch", "at"]),
}


@keras.saving.register_keras_serializable(package="contract_models")
class DictionaryModel(keras.Model):
    """A model that takes FEATURES, passes `training` on and has no `build`.

    Args:
        kind: `"keras"` looks up the rows in `keras.layers.Embedding`, `"embedding"` in a
            `slip.keras.Embedding` per feature, and `"collection"` in an `EmbeddingCollection`.
    """

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind, names = kind, list(FEATURES)
        if kind == "collection":
            pooled = {"seen": "mean", "tags": "sum"}
            tables = [Table(name, 4) for name in names]
            specs = [FeatureSpec(name, name, pooled.get(name)) for name in names]
            self.collection = EmbeddingCollection(tables, optimizers.SGD(0.1), specs, name="tables")
            tower = []
        elif kind == "embedding":
            layers = {n: Embedding(None, 4, optimizer=optimizers.SGD(0.1), name=n) for n in names}
            self.user, self.tags, self.country = (layers[n] for n in ("user", "tags", "country"))
            tower = [layers["seen"], keras.layers.GlobalAveragePooling1D()]
        else:
            layers = {name: keras.layers.Embedding(8, 4, name=name) for name in names}
            self.user, self.tags = layers["user"], layers["tags"]
            texts = keras.layers.StringLookup(vocabulary=COUNTRIES)
            self.country = keras.Sequential([texts, layers["country"]])
            tower = [layers["seen"], keras.layers.GlobalAveragePooling1D()]
        self.tower = keras.Sequential([*tower, keras.layers.Dense(3)])
        self.top = keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if self.kind == "collection":
            rows = self.collection(inputs, training=training)
        else:
            rows = {name: getattr(self, name)(inputs[name]) for name in ("user", "country")}
            rows["tags"] = tf.reduce_sum(self.tags(inputs["tags"]), axis=1)
            rows["seen"] = inputs["seen"]
        rows["seen"] = self.tower(rows["seen"], training=training)
        return self.top(tf.concat([rows[name] for name in FEATURES], axis=-1))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kind": self.kind}

    def copy_from(self, reference: DictionaryModel) -> None:
        """Writes the rows and weights of a model with `kind="keras"`."""
        tables = [reference.user, reference.tower.layers[0], reference.tags]
        keys = [np.arange(8)] * 3 + [np.array(COUNTRIES)]
        rows = [layer.get_weights()[0] for layer in (*tables, reference.country.layers[1])]
        rows[3] = rows[3][1:4]  # The first row is for other texts.
        layers = [self.collection] * 4 if self.kind == "collection" else None
        layers = layers or [self.user, self.tower.layers[0], self.tags, self.country]
        for layer, name, of_table, values in zip(layers, FEATURES, keys, rows, strict=True):
            layer.table(name).write(of_table, values)
        self.tower.layers[-1].set_weights(reference.tower.layers[-1].get_weights())
        self.top.set_weights(reference.top.get_weights())


@keras.saving.register_keras_serializable(package="contract_models")
class BuiltDictionaryModel(DictionaryModel):
    """A `DictionaryModel` whose `build` builds its layers by shape."""

    def build(self, input_shape: Any) -> None:
        is_pooled = self.kind == "collection"
        self.tower.build((None, 4) if is_pooled else tuple(input_shape["seen"]))
        self.top.build((None, 3 * 4 + 3))
        self.built = True


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
