"""The saturation engine masks and defers gradients of a plain Keras model."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import (
    DistributedGradientTape,
    DistributedOptimizer,
    SingleProcess,
    flush_deferred,
)
from slipstream_tf.tables.variable import VariableStore

USERS, ITEMS, DIM, BATCH, STEPS = 200, 100, 4, 64, 120


def train(*policies, dry_run=False):
    """Trains a product of embeddings. Rows of popular keys converge early."""
    keras.utils.set_random_seed(1)
    layers = {
        "user": keras.layers.Embedding(USERS, DIM),
        "item": keras.layers.Embedding(ITEMS, DIM),
    }
    for name, size in (("user", USERS), ("item", ITEMS)):
        layers[name].build((size,))
    optimizer = keras.optimizers.Adagrad(0.1)
    variables = [layer.embeddings for layer in layers.values()]
    optimizer.build(variables)
    tables = {name: layer.embeddings for name, layer in layers.items()}
    store = VariableStore(tables, optimizer)
    slipstream = slip.Slipstream(
        store,
        policies,
        window=slip.Window(10, warmup=30, sample=500),
        hot_set=slip.HotSet(memory=40 * DIM * 4),
        dry_run=dry_run,
    )

    @tf.function
    def step(keys, label):
        # The classifier must see every batch, because it derives T from the examples.
        slipstream.tracker.classifier.classify(keys, slipstream.specs)
        with DistributedGradientTape(tf.GradientTape(), slipstream) as tape:
            vectors = [layers[name](keys[name]) for name in layers]
            logits = tf.reduce_sum(vectors[0] * vectors[1], axis=1)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, logits))
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        users = np.minimum(rng.zipf(1.5, BATCH), USERS) - 1
        items = np.minimum(rng.zipf(1.5, BATCH), ITEMS) - 1
        label = (rng.random(BATCH) < 0.3).astype(np.float32)
        step({"user": tf.constant(users), "item": tf.constant(items)}, tf.constant(label))
        slipstream.step()
    return slipstream, [variable.numpy() for variable in variables]


def test_saturated_keys_are_masked_after_warmup():
    slipstream, _ = train(slip.MaskGradients(fraction=0.6))
    reports = slipstream.tracker.reports
    masked = [sum(table.rows.masked for table in report.tables) for report in reports]
    assert len(reports) == STEPS // 10
    assert masked[:3] == [0, 0, 0] and sum(masked[4:]) > 0
    assert all(report.rows_offered >= report.rows_sent for report in reports)
    assert "masked" in str(slipstream.report())


def test_dry_run_equals_plain_training():
    dry_run, rows = train(slip.MaskGradients(fraction=0.6), dry_run=True)
    _, plain_rows = train()
    for mine, plain in zip(rows, plain_rows, strict=True):
        np.testing.assert_array_equal(mine, plain)
    assert sum(table.rows.masked for r in dry_run.tracker.reports for table in r.tables) > 0


@pytest.mark.parametrize(
    "until", [slip.Movement(0.002), slip.Interval(fraction=0.6)], ids=["movement", "interval"]
)
def test_gradients_are_deferred_after_warmup(until):
    slipstream, rows = train(slip.DeferGradients(until))
    deferred = [sum(table.rows.deferred for table in r.tables) for r in slipstream.tracker.reports]
    assert deferred[:3] == [0, 0, 0] and sum(deferred[4:]) > 0
    assert "have been sent" in str(slipstream.report())
    store = slipstream.store
    waiting = sum(store.deferred_rows().values())
    assert waiting > 0
    assert flush_deferred(slipstream, store.optimizer) == waiting
    _, plain_rows = train()
    for mine, plain in zip(rows, plain_rows, strict=True):
        assert np.abs(mine - plain).max() < 0.3
    dry_run, unsaved_rows = train(slip.DeferGradients(until), dry_run=True)
    for mine, plain in zip(unsaved_rows, plain_rows, strict=True):
        np.testing.assert_array_equal(mine, plain)
    assert sum(t.rows.deferred for r in dry_run.tracker.reports for t in r.tables) > 0


def test_fit_applies_deferred_gradients_at_epoch_end():
    keras.utils.set_random_seed(2)
    layer = keras.layers.Embedding(ITEMS, DIM)
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.build((None, 1))
    store = VariableStore({"item": layer.embeddings})
    # Adam has no known movement, therefore gradients are deferred by interval.
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.01), SingleProcess(), store)
    slipstream = slip.Slipstream(
        store,
        slip.DeferGradients(slip.Interval()),
        window=slip.Window(4, warmup=0),
        saturation=slip.Saturation(threshold=1.0),
    )
    model.compile(optimizer, "mse")
    waiting = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: waiting.append(store.deferred_rows()["item"]),
        on_epoch_end=lambda epoch, logs: waiting.append(-store.deferred_rows()["item"]),
    )
    keys = np.random.default_rng(1).integers(0, 20, (15 * 8, 1))
    model.fit(
        keys,
        np.ones(len(keys)),
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[slipstream.callback(), watch],
    )
    assert waiting[14] > 0 and waiting[15] == 0 and waiting[-2] > 0 and waiting[-1] == 0
    counts = store.update_counts("item")
    assert counts.flushed == waiting[14] + waiting[-2]
    assert int(model.optimizer.iterations) == 30, "a flush is no step"


@pytest.mark.parametrize(
    "policy", [slip.MaskGradients(fraction=0.5), slip.DeferGradients(slip.Movement(0.01))]
)
def test_deleted_model_is_freed_with_its_store(policy):
    references = _fit_and_trace(policy)
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


def _fit_and_trace(policy):
    """Returns weak references to a trained model, its variable and its store."""
    embedding, adagrad = keras.layers.Embedding(ITEMS, DIM), keras.optimizers.Adagrad(0.1)
    embedding.build()
    store = VariableStore({"item": embedding.embeddings}, adagrad)
    engine = slip.Slipstream(store, policy, features={"item": "item"})
    keys = keras.Input((), dtype="int64", name="item")
    model = keras.Model({"item": keys}, keras.layers.Dense(1)(embedding(keys)))
    model.compile(DistributedOptimizer(adagrad, SingleProcess(), store), "mse")
    data = tf.data.Dataset.from_tensor_slices(({"item": np.arange(64)}, np.zeros(64))).batch(16)
    model.fit(engine.apply(data), callbacks=[engine.callback()], verbose=0)

    @tf.function
    def step(inputs):
        with DistributedGradientTape(tf.GradientTape(), engine) as tape:
            loss = tf.reduce_sum(model(inputs, training=True))
        return tape.gradient(loss, model.trainable_variables)

    step({"item": tf.constant([1, 2])})
    rows = embedding.embeddings.value
    parts = {"model": model, "rows": rows, "memory": rows.handle, "store": store, "engine": engine}
    return {name: weakref.ref(part) for name, part in parts.items()}
