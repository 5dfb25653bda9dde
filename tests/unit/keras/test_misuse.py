"""Tests that wrong uses of an engine in `fit` raise clear errors.

Some unusual uses work.
"""

from __future__ import annotations

import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf import Table, Window, _compat, optimizers
from slipstream_tf.distributed import SingleProcess
from slipstream_tf.keras import EmbeddingCollection, RanksCallback, SaturationCallback, Slipstream

BATCH, BATCHES = 8, 24


def arrays():
    keys = np.minimum(np.random.default_rng(0).zipf(1.5, (BATCH * BATCHES, 2)), 20)
    return keys, (keys[:, 0] % 2).astype(np.float32)


def batches():
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)


def make(kind=slip.keras.Model):
    embeddings = EmbeddingCollection([Table("a", 4), Table("b", 4)], optimizers.SGD(0.05))
    inputs = keras.Input((2,), dtype="int64")
    model = kind(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(embeddings(inputs))))
    model.compile("sgd", "mse")
    return embeddings, model


def engine(embeddings, policies=()):
    return Slipstream(embeddings, policies, window=Window(steps=5, warmup=0))


def fit(model, data, callbacks, **options):
    return model.fit(data, callbacks=callbacks, verbose=0, shuffle=False, **options)


def test_engine_of_other_model_raises(tmp_path):
    embeddings, model = make()
    slipstream = engine(embeddings)
    model.save(tmp_path / "m.keras")
    for other in (make()[1], keras.models.load_model(tmp_path / "m.keras")):
        with pytest.raises(ValueError, match=r"Invalid `embeddings`.*layer of this model.*loaded"):
            fit(other, slipstream.apply(batches()), [slipstream.callback()])
    assert slipstream.end_window().step == 0
    fit(model, slipstream.apply(batches()), [slipstream.callback()])


def test_layer_in_nested_model_is_found():
    embeddings, inner = make()
    inputs = keras.Input((2,), dtype="int64")
    outer = slip.keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))
    outer.compile("sgd", "mse")
    slipstream = engine(embeddings)
    fit(outer, slipstream.apply(batches()), [slipstream.callback()])
    assert slipstream.end_window().step == BATCHES


@pytest.mark.parametrize("is_same", [True, False])
def test_two_callbacks_of_one_engine_raise(is_same):
    embeddings, model = make()
    slipstream = engine(embeddings)
    first = slipstream.callback()
    second = first if is_same else slipstream.callback()
    with pytest.raises(ValueError, match="Invalid `callbacks`"):
        fit(model, slipstream.apply(batches()), [first, second])
    # A single callback works, even after the refused call.
    fit(model, slipstream.apply(batches()), [first])
    fit(model, slipstream.apply(batches()), [first])
    assert slipstream.end_window().step == 2 * BATCHES


def test_two_engines_of_one_layer_raise():
    embeddings, model = make()
    first, second = engine(embeddings), engine(embeddings)
    with pytest.raises(ValueError, match=r"Invalid `callbacks`: '2 Slipstream callbacks'"):
        fit(model, second.apply(batches()), [first.callback(), second.callback()])
    with pytest.raises(ValueError, match=r"Invalid `slipstream`.*created last"):
        fit(model, first.apply(batches()), [first.callback()])
    with pytest.raises(ValueError, match=r"Invalid `slipstream`.*created last"):
        first.end_window()
    fit(model, second.apply(batches()), [second.callback()])


def test_validation_data_from_apply_raises():
    embeddings, model = make()
    slipstream = engine(embeddings)
    train = slipstream.apply(batches())
    with pytest.raises(
        ValueError, match=r"Invalid `validation_data`: 'a result of Slipstream.apply'"
    ):
        fit(model, train, [slipstream.callback()], validation_data=slipstream.apply(batches()))
    fit(model, train, [slipstream.callback()], validation_data=batches())


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_class_weights_of_plain_model_must_be_passed_to_apply(keep):
    embeddings, model = make(keras.Model)
    slipstream = engine(embeddings, slip.SkipExamples(score=slip.RowDrift(), keep_rate=keep))
    weights = {0: 1.0, 1: 2.0}
    callbacks = [slipstream.callback()]
    with pytest.raises(ValueError, match=r"Invalid `class_weight`.*apply\(data, class_weight"):
        fit(model, slipstream.apply(batches()), callbacks, class_weight=weights)
    fit(model, slipstream.apply(batches(), class_weight=weights), callbacks)


def test_prefetch_after_apply_warns():
    embeddings, model = make(keras.Model)
    slipstream = engine(embeddings, slip.SkipExamples(score=slip.RowDrift()))
    data = slipstream.apply(batches()).prefetch(4)
    slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: time.sleep(0.02))
    with pytest.warns(RuntimeWarning, match=r"fetches batches ahead.*after \.prefetch"):
        fit(model, data, [slipstream.callback(), slow])


def test_no_prefetch_warning_without_prefetch():
    embeddings, model = make(keras.Model)
    slipstream = engine(embeddings, slip.SkipExamples(score=slip.RowDrift()))
    data = slipstream.apply(batches())
    next(iter(data))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fit(model, data, [slipstream.callback()])


def test_callback_works_with_and_without_call(tmp_path):
    embeddings, model = make()
    slipstream = engine(embeddings)
    fit(model, slipstream.apply(batches()), [slipstream.callback])
    assert slipstream.end_window().step == BATCHES
    assert isinstance(slipstream.callback(tmp_path), SaturationCallback)


def test_engine_as_callback_raises():
    embeddings, model = make()
    with pytest.raises(TypeError, match=r"callbacks=\[slipstream\.callback\(\)\]"):
        fit(model, batches(), [engine(embeddings)])


def test_arrays_instead_of_dataset_raise():
    slipstream = engine(make()[0])
    for wrong in (arrays(), arrays()[0], [batches()]):
        with pytest.raises(ValueError, match=r"Invalid `dataset`.*from_tensor_slices\(\(x, y\)\)"):
            slipstream.apply(wrong)


def test_unbatched_elements_raise():
    slipstream = engine(make()[0])
    with pytest.raises(ValueError, match=r"a batch dimension.*\.batch\(n\)"):
        slipstream.apply(batches().unbatch())


@pytest.mark.parametrize("shape", [[-1], [-1, 1]])
def test_non_numeric_label_raises(shape):
    embeddings, model = make()
    slipstream = engine(embeddings)

    def spoil(keys, label):
        is_third = tf.range(tf.shape(label)[0]) == 3
        return keys, tf.reshape(tf.where(is_third, np.float32(np.nan), label), shape)

    with pytest.raises(tf.errors.InvalidArgumentError, match="A label is not finite"):
        fit(model, slipstream.apply(batches().map(spoil)), [slipstream.callback()])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_labels_of_multiple_tasks_can_be_missing():
    slipstream = engine(make()[0])
    data = batches().map(lambda x, y: (x, tf.stack([y, y * np.nan], axis=1)))
    assert sum(1 for _ in slipstream.apply(data)) == BATCHES


@pytest.mark.parametrize("kind", ["none", "layer", "swapped"])
def test_ranks_callback_requires_store(kind):
    embeddings, _ = make()
    comm, store = SingleProcess(), {"none": None, "layer": embeddings}.get(kind)
    if kind == "swapped":
        comm, store = embeddings.store, comm
    with pytest.raises(ValueError, match=r"Invalid `store`.*RanksCallback.*embeddings\.store"):
        RanksCallback(comm, store)


def test_ranks_callback_accepts_single_process():
    embeddings, model = make()
    with pytest.raises(ValueError, match=r"Invalid `comm`: None.*distributed\.init\(\)"):
        RanksCallback(None, embeddings.store)
    logs = fit(model, batches(), [RanksCallback(SingleProcess(), embeddings.store)]).history
    assert logs["rows_learning_rate"] == pytest.approx([0.05])


@pytest.mark.parametrize(
    ("version", "numbers"), [("3.15.1", (3, 15)), ("2.21.0-rc1", (2, 21)), ("3.0", (3, 0))]
)
def test_version_numbers_are_parsed(version, numbers):
    assert _compat.version_numbers(version) == numbers


def test_keras_3_is_accepted():
    assert _compat.require_keras() is keras


def test_keras_2_raises(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "2.15.0")
    with pytest.raises(
        ImportError, match=r"requires Keras 3, but keras 2\.15\.0 is installed\. Run: pip"
    ):
        _compat.require_keras()


def test_other_backend_raises(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match=r"the backend is 'jax'\. Set KERAS_BACKEND=tensorflow"):
        _compat.require_keras()


def test_arrays_become_tensors_of_same_dtype():
    inputs = {"keys": {"a": np.array([1 << 60])}, "dense": tf.zeros((1, 2))}
    outputs = _compat.arrays_to_tensors(inputs)
    assert outputs["keys"]["a"].dtype == tf.int64
    assert int(outputs["keys"]["a"][0]) == 1 << 60
    assert outputs["dense"] is inputs["dense"]
    assert _compat.arrays_to_tensors(np.ones(2, np.float32)).dtype == tf.float32
