"""Tests that bags are reduced as by `keras_rs.layers.EmbedReduce`, and masked as by Keras.

Both layers get the same rows, and the expected values are also computed in NumPy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import keras_rs
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip

DIM, RATE = 4, 0.5
ROWS = np.random.default_rng(3).normal(size=(8, DIM)).astype(np.float32)
BAGS: list[list[int]] = [[1], [2, 3, 2], [7, 5], [6]]
WEIGHTS = [[0.5], [1.0, 2.0, -0.25], [3.0, 4.0], [2.0]]
COMBINERS = ["sum", "mean", "sqrtn"]


def sparse(bags: list[list[Any]], dtype: Any) -> tf.SparseTensor:
    return tf.ragged.constant(bags, dtype=dtype).to_sparse()


def in_layout(layout: str) -> tuple[Any, Any, list[list[int]], list[list[float]]]:
    """Returns keys and weights as tensors and as lists."""
    bags, weights = BAGS, WEIGHTS
    if layout == "flat":
        bags, weights = [bag[:1] for bag in bags], [some[:1] for some in weights]
        return (
            tf.constant([b for (b,) in bags]),
            tf.constant([w for (w,) in weights]),
            bags,
            weights,
        )
    if layout == "dense":
        bags, weights = [[*bag, 4, 3][:2] for bag in bags], [[*w, 2.0, 1.5][:2] for w in weights]
        return tf.constant(bags), tf.constant(weights), bags, weights
    if layout == "sparse":
        return sparse(bags, tf.int64), sparse(weights, tf.float32), bags, weights
    return tf.ragged.constant(bags), tf.ragged.constant(weights), bags, weights


def divisor(combiner: str, weights: list[float]) -> float:
    if combiner == "sum":
        return 1.0
    return sum(weights) if combiner == "mean" else float(np.sqrt(np.square(weights).sum()))


def collection(combiner: str | None, padding_key: int | None = None) -> Any:
    layer = slip.keras.EmbeddingCollection(
        [slip.Table("t", DIM)],
        slip.optimizers.SGD(RATE),
        [slip.FeatureSpec("f", "t", combiner, padding_key)],
    )
    layer.table("t").write(np.arange(len(ROWS)), ROWS)
    return layer


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("layout", ["flat", "dense", "ragged", "sparse"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_bags_and_gradients_equal_embed_reduce(
    combiner: str, layout: str, is_weighted: bool
) -> None:
    keys, weights, bags, values = in_layout(layout)
    values = values if is_weighted else [[1.0] * len(bag) for bag in bags]
    expected, moved = np.zeros((len(bags), DIM)), np.zeros_like(ROWS)
    for example, (bag, some) in enumerate(zip(bags, values, strict=True)):
        for key, weight in zip(bag, some, strict=True):
            factor = weight / divisor(combiner, some)
            expected[example] += factor * ROWS[key]
            moved[key] -= RATE * factor * (example + 1)
    theirs = keras_rs.layers.EmbedReduce(8, DIM, combiner=combiner)
    theirs.build(keys.shape)
    theirs.set_weights([ROWS])
    np.testing.assert_allclose(theirs(keys, weights if is_weighted else None), expected, rtol=1e-5)
    layer = collection(combiner)
    given = {"f": weights} if is_weighted else None
    for call in (layer, tf.function(layer)):
        rows = call({"f": keys}, weights=given, training=False)["f"]
        assert rows.shape == (len(bags), DIM)
        np.testing.assert_allclose(rows, expected, rtol=1e-5)
    with tf.GradientTape() as tape:
        rows = layer({"f": keys}, weights=given, training=True)["f"]
        loss = tf.reduce_sum(rows * tf.range(1.0, len(bags) + 1)[:, None])
    tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_allclose(layer.table("t").read(np.arange(8)), ROWS + moved, atol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_empty_bags_and_zero_weights_give_zeros(combiner: str) -> None:
    layer = collection(combiner)
    keys = tf.ragged.constant([[], [2, 3]], dtype=tf.int64)
    zeros = layer({"f": keys}, weights={"f": tf.ragged.constant([[], [0.0, 0.0]])}, training=True)
    np.testing.assert_array_equal(zeros["f"], np.zeros((2, DIM)))
    np.testing.assert_array_equal(layer({"f": keys})["f"][0], np.zeros(DIM))


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("padding_key", [-1, 0])
def test_padding_is_not_part_of_a_bag(combiner: str, padding_key: int) -> None:
    padded = np.full((len(BAGS), 4), padding_key)
    for row, bag in zip(padded, BAGS, strict=True):
        row[1 : 1 + len(bag)] = bag
    layer = collection(combiner, padding_key)
    expected = [ROWS[bag].sum(axis=0) / divisor(combiner, [1.0] * len(bag)) for bag in BAGS]
    np.testing.assert_allclose(layer({"f": padded})["f"], expected, rtol=1e-5)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", ["flat", "dense", "ragged", "sparse"])
def test_symbolic_bags_give_dense_vectors(kind: str, is_weighted: bool) -> None:
    options = {kind: True} if kind in ("ragged", "sparse") else {}
    shape = () if kind == "flat" else (2,)
    keys = keras.Input(shape, dtype="int32", **options)
    weights = keras.Input(shape, dtype="float32", **options)
    given = {"weights": {"f": weights}} if is_weighted else {}
    rows = collection("mean")({"f": keys}, **given)["f"]
    assert rows.shape == (None, DIM) and rows.dtype == "float32"
    assert not rows.sparse and not rows.ragged


def test_saved_model_of_reduced_bags_predicts_the_same(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).integers(0, 8, (5, 3))
    inputs = keras.Input((3,), dtype="int64")
    model = keras.Model(inputs, collection("sqrtn")({"f": inputs})["f"])
    before = model.predict(keys, batch_size=2, verbose=0)
    np.testing.assert_allclose(before, ROWS[keys].sum(axis=1) / np.sqrt(3), rtol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(keys, batch_size=2, verbose=0), before)


@pytest.mark.parametrize("layer_of", ["Embedding", "EmbeddingCollection"])
def test_mask_reaches_pooling_over_keys(layer_of: str) -> None:
    keys = np.array([[3, 0, 5], [0, 0, 2], [1, 4, 0]])
    inputs = keras.Input((3,), dtype="int64")
    if layer_of == "Embedding":
        layer = slip.keras.Embedding(8, DIM, ROWS, mask_zero=True)
        rows = layer(inputs)
    else:
        rows = collection(None, 0)({"f": inputs})["f"]
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(rows))
    expected = [ROWS[bag[bag != 0]].mean(axis=0) for bag in keys]
    np.testing.assert_allclose(model.predict(keys, verbose=0), expected, rtol=1e-5)


@pytest.mark.parametrize("recurrent", ["GRU", "LSTM"])
def test_masked_positions_change_no_recurrent_state(recurrent: str) -> None:
    keras.utils.set_random_seed(1)
    cell = getattr(keras.layers, recurrent)(3)
    layer = slip.keras.Embedding(8, DIM, ROWS, mask_zero=True)
    outputs = [cell(layer(np.array([bag]))) for bag in ([3, 5], [3, 5, 0, 0], [3, 0, 0, 5])]
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-6)
    np.testing.assert_allclose(outputs[2], outputs[0], atol=1e-6)


def test_masked_positions_are_not_part_of_the_loss() -> None:
    keys = np.array([[3, 0, 5], [1, 0, 0]])
    layer = slip.keras.Embedding(8, DIM, ROWS, mask_zero=True, optimizer=slip.optimizers.SGD(RATE))
    inputs = keras.Input((3,), dtype="int64")
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse")
    loss = model.train_on_batch(keys, np.zeros((2, 3, DIM), np.float32))
    kept = ROWS[[3, 5, 1]]
    np.testing.assert_allclose(loss, np.square(kept).mean(axis=-1).sum() / 3, rtol=1e-5)
    found = layer.table("embedding").read([3, 5, 1])
    np.testing.assert_allclose(found, kept - RATE * 2 * kept / DIM / 3, rtol=1e-5)
