"""Tests of exports while other threads train, evaluate and export the same model."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip

KEYS = np.arange(10)
LABELS = (KEYS % 2).astype(np.float32)
WRITERS = {
    "slip.export": slip.export.saved_model,
    "model.export": lambda model, path: model.export(path, verbose=False),
    "tf.saved_model.save": tf.saved_model.save,
}


class Gate(keras.layers.Layer):
    """Returns its input. Each exporting thread first calls `pause`, once."""

    def __init__(self):
        super().__init__()
        self.paused, self.pause = set(), None

    def call(self, inputs):
        thread = threading.current_thread()
        if thread is not threading.main_thread() and thread not in self.paused:
            self.paused.add(thread)
            self.pause()
        return inputs


def make_model(dtype="float32"):
    keras.utils.set_random_seed(0)
    table = slip.Table("item", 4, storage=slip.Storage(dtype=dtype))
    layer = slip.keras.EmbeddingCollection([table], slip.optimizers.SGD(0.1))
    gate = Gate()
    inputs = keras.Input((1,), dtype="int64")
    hidden = gate(keras.layers.Flatten()(layer(inputs)))
    # Constant, so that an export differs from others only in its rows.
    output = keras.layers.Dense(1, "sigmoid", trainable=False)
    model = keras.Model(inputs, output(hidden))
    model.compile("sgd", "binary_crossentropy")
    layer.table("item").write(KEYS, np.random.default_rng(1).normal(size=(10, 4)))
    return model, layer, gate


def start(write, model, path):
    """Exports on another thread; returns a function that waits for the end."""
    errors = []

    def run():
        try:
            write(model, path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(60)
        assert not thread.is_alive()
        assert errors == []

    return join


def predictions(model):
    return model(KEYS[:, np.newaxis], training=False).numpy()


def served(path):
    signature = tf.saved_model.load(path).signatures["serving_default"]
    (outputs,) = signature(tf.constant(KEYS[:, np.newaxis])).values()
    return outputs.numpy()


def assert_evaluates_current_rows(model):
    losses = keras.losses.binary_crossentropy(LABELS[:, np.newaxis], predictions(model))
    found = model.evaluate(KEYS[:, np.newaxis], LABELS, verbose=0)
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-5)
    found = model.predict(KEYS[:, np.newaxis], verbose=0)
    np.testing.assert_allclose(found, predictions(model), rtol=1e-5)


@pytest.mark.parametrize("writer", WRITERS)
def test_first_evaluation_and_training_step_during_export_use_the_table(writer, tmp_path):
    model, layer, gate = make_model()
    is_tracing, continues = threading.Event(), threading.Event()

    def pause():
        is_tracing.set()
        assert continues.wait(60)

    gate.pause = pause
    before = predictions(model)
    join = start(WRITERS[writer], model, str(tmp_path / "1"))
    assert is_tracing.wait(60)
    assert_evaluates_current_rows(model)
    model.fit(KEYS[:, np.newaxis], LABELS, verbose=0)
    after = predictions(model)
    continues.set()
    join()
    # `slip.export` copies the rows at its start, and Keras and TensorFlow at the end.
    expected = before if writer == "slip.export" else after
    np.testing.assert_allclose(served(str(tmp_path / "1")), expected, rtol=1e-5)
    layer.table("item").write(KEYS, np.ones((10, 4)))
    assert_evaluates_current_rows(model)


@pytest.mark.parametrize(
    "writers", [("slip.export",) * 2, ("model.export",) * 2, list(WRITERS)[:2]]
)
def test_exports_of_one_model_at_once_are_complete(writers, tmp_path):
    model, layer, gate = make_model("bfloat16")
    gate.pause = threading.Barrier(2, timeout=60).wait
    joins = [
        start(WRITERS[writer], model, str(tmp_path / str(number)))
        for number, writer in enumerate(writers)
    ]
    for join in joins:
        join()
    for number in range(2):
        np.testing.assert_allclose(served(str(tmp_path / str(number))), predictions(model), 1e-5)
    layer.table("item").write(KEYS, np.ones((10, 4)))
    assert_evaluates_current_rows(model)


def test_second_export_to_one_folder_raises(tmp_path):
    model, _, gate = make_model()
    is_tracing, continues = threading.Event(), threading.Event()
    gate.pause = lambda: (is_tracing.set(), continues.wait(60))
    join = start(slip.export.saved_model, model, str(tmp_path / "1"))
    assert is_tracing.wait(60)
    with pytest.raises(ValueError, match=r"Invalid `path`: .*no other thread is writing"):
        slip.export.saved_model(model, tmp_path / "1")
    continues.set()
    join()
    np.testing.assert_allclose(served(str(tmp_path / "1")), predictions(model), rtol=1e-5)


def test_function_of_the_model_does_not_keep_exported_rows(tmp_path):
    _, layer, _ = make_model()

    class Traced(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layer

        @tf.function
        def call(self, inputs):
            return self.inner(inputs)[:, 0]

    model, spec = Traced(), tf.TensorSpec([None, 1], tf.int64)
    with pytest.raises(ValueError, match=r"Invalid `model`: .*outside of a tf\.function"):
        slip.export.saved_model(model, tmp_path / "1", signature=spec)
    rows = np.arange(40.0, dtype=np.float32).reshape(10, 4)
    layer.table("item").write(KEYS, rows)
    np.testing.assert_array_equal(predictions(model), rows)


def test_lookup_in_a_loop_is_exported(tmp_path):
    _, layer, _ = make_model()

    class Loop(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def call(self, inputs):
            shape = tf.TensorSpec([None, 1, 4])
            return tf.map_fn(self.inner, inputs[:, tf.newaxis], fn_output_signature=shape)

    spec = tf.TensorSpec([None, 1], tf.int64)
    slip.export.saved_model(Loop(), tmp_path / "1", signature=spec)
    np.testing.assert_array_equal(
        served(str(tmp_path / "1"))[:, 0], layer(KEYS[:, np.newaxis], training=False)
    )
