"""Tests that `HotRows` and `Hotline` train the same model as plain training."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from slipstream_tf import Table, initializers, optimizers
from slipstream_tf.baselines.hot_rows import Hotline, HotRows
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.models import DLRM

FIELDS, DIM, NUMBERS = 3, 4, 2
TABLES = [
    Table(f"t{i}", DIM, initializer=initializers.RandomUniform(seed=i)) for i in range(FIELDS)
]
HOT = [[0, 1, 2, 3], [0, 1, 2], [1, 0]]


class HotlineDLRM(Hotline, DLRM):
    """DLRM that runs a batch in two parts, popular and other examples."""


def trained(kind: type[DLRM], embeddings: EmbeddingCollection, batches: list[Any]) -> DLRM:
    keras.utils.set_random_seed(0)
    model = kind(embeddings, NUMBERS, (8, DIM), (8, 1), returns_logits=True)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=["AUC"],
    )
    for x, y in batches:
        model.fit(x, y, batch_size=len(y), verbose=0, shuffle=False)
    return model


def drawn(popular: float, size: int, seed: int) -> Any:
    random = np.random.default_rng(seed)
    keys = random.integers(0, 12, (size, FIELDS))
    keys[random.random(size) < popular] %= 2
    dense = random.normal(size=(size, NUMBERS)).astype(np.float32)
    return {"dense": dense, "keys": keys}, (random.random((size, 1)) < 0.4).astype(np.float32)


@pytest.mark.parametrize("kind", [DLRM, HotlineDLRM])
def test_training_equals_plain_layer(kind: type[DLRM]) -> None:
    # Include batches that consist only of popular examples and batches without any.
    shares = [0.5, 0.7, 1.0, 0.0, 0.5, 0.9]
    batches = [drawn(fraction, 16 + 3 * seed, seed) for seed, fraction in enumerate(shares)]
    plain = trained(DLRM, EmbeddingCollection(TABLES, optimizers.Adagrad(0.1, 0.1)), batches)
    split = trained(kind, HotRows(TABLES, optimizers.Adagrad(0.1, 0.1), HOT), batches)
    x, _ = drawn(0.5, 64, 99)
    np.testing.assert_allclose(split(x), plain(x), rtol=2e-4, atol=1e-5)
    assert set(split.embeddings.hot.store.keys_of("t1")) == {0, 1, 2}
    assert not {0, 1, 2} & set(split.embeddings.store.keys_of("t1").tolist())


def test_lookup_weights_raise() -> None:
    layer = HotRows(TABLES, optimizers.Adagrad(0.1), HOT)
    keys = np.zeros((2, FIELDS), np.int64)
    with pytest.raises(ValueError, match=r"`weights`.*HotRows does not support `weights`"):
        layer.call(keys, weights={"t0": np.ones(2, np.float32)})
