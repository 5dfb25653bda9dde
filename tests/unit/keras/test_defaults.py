"""What optimizers do as they are by default: a click model learns."""

from __future__ import annotations

from typing import Any

import keras

from slipstream_tf import Table, models, optimizers
from slipstream_tf.data.readers import registry
from slipstream_tf.keras import EmbeddingCollection


def auc_of(rule: Any) -> float:
    keras.utils.set_random_seed(0)
    train, test = (
        registry.open_data("generated:10000:100", part=part, batch_size=128)
        for part in ("train", "test")
    )
    fields = train.spec.fields
    embeddings = EmbeddingCollection([Table(field, 4) for field in fields], rule)
    model = models.DLRM(embeddings, train.spec.num_dense, bottom=[8, 4], top=[8, 1])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=[keras.metrics.AUC(from_logits=True)])
    model.fit(train.dataset(), verbose=0)
    return float(model.evaluate(test.dataset().take(20), verbose=0)[1])


def test_the_default_learns_as_the_three_arguments_did_and_kerass_values_do_not() -> None:
    assert optimizers.Adagrad(0.05) == optimizers.Adagrad(0.05, 0.0, 1e-7)
    by_default = auc_of(None)
    assert by_default > 0.70, by_default
    assert by_default > auc_of(optimizers.Adagrad(0.05, 0.1, 1e-7)) + 0.1
