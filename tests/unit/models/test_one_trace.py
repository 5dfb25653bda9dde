"""Tests that training steps are traced once for all sizes and states."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf import Table, optimizers
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.models import DLRM

DIM = 4
NUMBERS = 2
# Sizes of batches, including an empty batch.
SIZES = (8, 3, 8, 0, 5)
# "user" has one key, "article" a bag of any length, and "tag" two padded positions.
SIGNATURE = (
    {
        "dense": tf.TensorSpec([None, NUMBERS], tf.float32),
        "keys": {
            "user": tf.TensorSpec([None], tf.int64),
            "article": tf.RaggedTensorSpec([None, None], tf.int64, 1),
            "tag": tf.TensorSpec([None, 2], tf.int64),
        },
    },
    tf.TensorSpec([None], tf.float32),
)


def make_dlrm(dtype="float32"):
    tables = [Table(name, DIM) for name in ("user", "article", "tag")]
    embeddings = EmbeddingCollection(tables, optimizers.Adagrad(0.1), dtype=dtype)
    return DLRM(embeddings, NUMBERS, [8, DIM], [8, 1], returns_logits=True, dtype=dtype)


def make_batches(sizes=SIZES):
    rng = np.random.default_rng(0)
    batches = []
    for size in sizes:
        lengths = rng.integers(0, 6, size)
        bags = tf.constant(rng.integers(0, 20, lengths.sum()), tf.int64)
        keys = {
            "user": tf.constant(rng.integers(0, 50, size), tf.int64),
            "article": tf.RaggedTensor.from_row_lengths(bags, lengths),
            "tag": tf.constant(rng.integers(-1, 9, (size, 2)), tf.int64),
        }
        dense = tf.constant(rng.normal(size=(size, NUMBERS)), tf.float32)
        labels = tf.constant(rng.integers(0, 2, size), tf.float32)
        batches.append(({"dense": dense, "keys": keys}, labels))
    return batches


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_custom_step_is_traced_once(dtype):
    model = make_dlrm(dtype)
    optimizer = keras.optimizers.Adagrad(0.1)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum")
    traces = []

    @tf.function(input_signature=SIGNATURE)
    def step(inputs, labels):
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = loss_of(labels[:, tf.newaxis], model(inputs, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return loss

    losses = [float(step(*batch)) for _ in range(20) for batch in make_batches()]
    assert len(traces) == 1 and step.experimental_get_tracing_count() == 1
    assert np.isfinite(losses).all()
    per_round = np.reshape(losses, (20, len(SIZES))).sum(axis=1)
    assert per_round[-1] < 0.8 * per_round[0]


class CountedDLRM(DLRM):
    """Counts the traces of its training step."""

    traces = 0

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


class TracesOfTheFirstStep(keras.callbacks.Callback):
    """Records the number of traces after the first step.

    TensorFlow traces a step that may create variables twice before the step runs.
    """

    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count = self.count or self.model.traces


@pytest.mark.parametrize("saves", [False, True])
def test_fit_traces_in_first_step_only(saves):
    tables = [Table(name, DIM) for name in ("user", "article", "tag")]
    embeddings = EmbeddingCollection(tables, optimizers.Adagrad(0.1))
    model = CountedDLRM(embeddings, NUMBERS, [8, DIM], [8, 1], returns_logits=True)
    model.compile("adagrad", keras.losses.BinaryCrossentropy(from_logits=True))
    batches = make_batches((8, 3, 5) * 4)
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=SIGNATURE)
    first = TracesOfTheFirstStep()
    if not saves:
        model.fit(data, epochs=3, verbose=0, callbacks=[first])
    else:
        policies = [slip.SkipExamples(slip.RowDrift(), fraction=0.5), slip.DeferGradients()]
        engine = slip.Slipstream(embeddings, policies, slip.Window(4, warmup=0))
        engine_data = engine.apply(data, batch_size=6)
        # The states of keys change at the end of a window, and therefore the batch sizes, too.
        model.fit(engine_data, epochs=3, verbose=0, callbacks=[first, engine.callback()])
        assert len(engine.tracker.reports) >= 4
    assert 1 <= first.count == model.traces
