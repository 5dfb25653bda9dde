"""Tests that common uses of `fit` lose no examples and warn correctly."""

from __future__ import annotations

import gc
import logging
import math
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf import Table, Window, optimizers
from slipstream_tf.data.readers.generator import GeneratedReader
from slipstream_tf.keras import EmbeddingCollection, Slipstream

BATCH, COUNT = 8, 240
BATCHES = COUNT // BATCH


def arrays():
    keys = np.minimum(np.random.default_rng(0).zipf(1.5, (COUNT, 2)), 20)
    return keys, (keys[:, 0] % 2).astype(np.float32)


def batches():
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)


class Run:
    """A functional model and its engine."""

    def __init__(
        self, kind=slip.keras.Model, policies=(), steps=5, warmup=0.25, planned_steps=None
    ):
        keras.utils.set_random_seed(0)
        self.embeddings = EmbeddingCollection([Table("a", 4), Table("b", 4)], optimizers.SGD(0.05))
        inputs = keras.Input((2,), dtype="int64")
        vectors = keras.layers.Flatten()(self.embeddings(inputs))
        self.model = kind(inputs, keras.layers.Dense(1, "sigmoid")(vectors))
        self.model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        window = Window(steps=steps, warmup=warmup, planned_steps=planned_steps)
        self.slipstream = Slipstream(self.embeddings, policies, window=window)

    def fit(self, data, **options):
        options = {"callbacks": [self.slipstream.callback()], "verbose": 0, **options}
        return self.model.fit(data, shuffle=False, **options)

    @property
    def steps(self):
        # The optimizer's iterations also count the step that detects the end of the data.
        return int(self.embeddings.store.export_table("a")["steps"][0])


@pytest.fixture
def said(caplog):
    """Returns a function that lists all warnings except the one on retracing."""
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING, "absl"):
        warnings.simplefilter("always")
        # TensorFlow counts the traces of all tests in the process.
        reported = lambda: [str(w.message) for w in caught] + caplog.messages  # noqa: E731
        yield lambda: [text for text in reported() if "triggered tf.function retracing" not in text]


# Half of the examples are skipped in the first epoch and none from the second epoch on.
FEWER_SKIPS = {
    "policies": slip.baselines.SkipAtRandom((*[0.5] * 4, 0.0)),
    "warmup": 0,
}
BY_DRIFT = slip.SkipExamples(score=slip.RowDrift(), fraction=0.5)


@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("kind", [slip.keras.Model, keras.Model])
def test_epochs_that_skip_less_than_first_train_all_examples(said, kind, steps_per_execution):
    run = Run(kind, **FEWER_SKIPS)
    run.model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    history = run.fit(run.slipstream.apply(batches()), epochs=3, validation_data=batches().take(3))
    report = run.slipstream.end_window()
    savings = run.slipstream.report()
    assert savings.examples_seen == 3 * COUNT
    assert 0 < savings.examples_skipped < 2 * COUNT and report.step == run.steps
    assert run.steps >= (3 * COUNT - savings.examples_skipped) / BATCH
    assert len(history.history["val_loss"]) == 3
    assert said() == []


def test_warning_filter_is_removed_after_fit():
    run = Run()
    before = list(warnings.filters)
    run.fit(run.slipstream.apply(batches()), epochs=2)
    assert warnings.filters == before
    with pytest.raises(ValueError, match="has no"):
        run.fit(
            run.slipstream.apply(batches()),
            callbacks=[run.slipstream.callback(), RaisingCallback()],
        )
    gc.collect()
    assert warnings.filters == before


def test_deleted_model_is_freed_with_its_engine():
    def train():
        run = Run(policies=slip.MaskGradients(fraction=0.5))
        run.fit(run.slipstream.apply(batches()), validation_data=batches().take(3))
        parts = run.model, run.embeddings, run.embeddings.store, run.slipstream
        return [weakref.ref(part) for part in parts]

    references = train()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


class RaisingCallback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise ValueError("the callback has no heart")


def test_missing_steps_per_epoch_still_warn(said):
    run = Run(**FEWER_SKIPS)
    run.fit(run.slipstream.apply(batches()), epochs=2, steps_per_epoch=BATCHES - 1)
    assert any("ran out of data" in words for words in said())


def unknown_length():
    return batches().filter(lambda *_: True)


def test_unknown_dataset_length_is_found_in_first_epoch(said):
    run = Run(policies=BY_DRIFT, warmup=0.25)
    data = run.slipstream.apply(unknown_length(), BATCH)
    run.fit(data, epochs=4, validation_data=batches().take(2))
    savings = run.slipstream.report()
    assert run.slipstream.plan.steps == 4 * BATCHES
    assert all(not r.examples_skipped for r in savings.reports if r.step <= BATCHES)
    assert savings.examples_skipped > 0
    assert not [words for words in said() if "ran out" in words or "epoch" in words]


def test_truncated_epoch_warns(said):
    run = Run(**FEWER_SKIPS)
    run.fit(run.slipstream.apply(unknown_length(), BATCH), epochs=3)
    (words, again) = (w for w in said() if "Keras ended epoch" in w)
    assert "epoch 2" in words and "epoch 3" in again and "assert_cardinality" in words
    assert not any("ran out" in words for words in said())


@pytest.mark.parametrize("epochs", [1, 3])
def test_steps_per_epoch_with_repeated_data_gives_planned_steps(epochs):
    run = Run(policies=BY_DRIFT, warmup=0.5)
    data = run.slipstream.apply(batches().repeat())
    run.fit(data, epochs=epochs, steps_per_epoch=40)
    assert run.slipstream.plan.steps == 40 * epochs
    assert run.slipstream.tracker.warmup_steps == 20 * epochs
    assert run.slipstream.report().examples_skipped > 0
    assert run.steps == 40 * epochs


def test_data_without_apply_gives_planned_steps():
    run = Run(policies=slip.DeferGradients(until=slip.Movement(0.01)), warmup=0.5)
    run.fit(batches(), epochs=2)
    assert run.slipstream.plan.steps == 2 * BATCHES


def test_resumed_fit_plans_remaining_steps():
    run = Run(policies=BY_DRIFT)
    data = run.slipstream.apply(batches())
    run.fit(data, epochs=2)
    run.fit(data, epochs=5, initial_epoch=2)
    assert run.slipstream.plan.steps == 5 * BATCHES


def test_batch_size_is_found_without_reading():
    read = []

    def note(keys, label):
        tf.numpy_function(lambda: read.append(1) or np.int64(0), [], tf.int64)
        return keys, label

    run = Run(policies=BY_DRIFT)
    data = run.slipstream.apply(batches().map(note).prefetch(2))
    assert data.cardinality() == BATCHES and read == []
    assert [len(label) for _, label in data] == [BATCH] * BATCHES
    halves = run.slipstream.apply(batches(), batch_size=2 * BATCH)
    assert sum(1 for _ in halves) == BATCHES // 2 == run.slipstream.plan.batches


def test_batches_larger_than_declared_raise():
    run = Run(policies=BY_DRIFT)
    doubled = batches().map(
        lambda *parts: tf.nest.map_structure(lambda p: tf.repeat(p, 2, 0), parts)
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"more than 8 .*\.batch\(8\).*batch_size"
    ):
        list(run.slipstream.apply(doubled))
    assert [len(y) for _, y in run.slipstream.apply(doubled, 2 * BATCH)] == [2 * BATCH] * BATCHES


@pytest.mark.parametrize("read", ["generated", "rebatched", "mapped"])
def test_plan_counts_trained_batches_of_larger_input_batches(read, said):
    run = Run(policies=BY_DRIFT, warmup=0.5)
    if read == "rebatched":
        data = (
            unknown_length()
            .rebatch(4 * BATCH)
            .apply(tf.data.experimental.assert_cardinality(math.ceil(BATCHES / 4)))
        )
    else:
        reader = GeneratedReader(COUNT, "train", 4 * BATCH, fields=2, cardinalities=(20, 20))
        data = reader.dataset()
    if read == "mapped":
        data = data.map(lambda features, label: (features["keys"], label))
    applied = run.slipstream.apply(data, BATCH)
    assert run.slipstream.plan.batches == 4 * math.ceil(BATCHES / 4)
    assert [len(parts[-1]) for parts in applied.take(9)] == [BATCH] * 9
    assert said() == []


def test_batch_size_defaults_to_reader():
    run = Run(policies=BY_DRIFT)
    reader = GeneratedReader(COUNT, "train", BATCH, fields=2, cardinalities=(20, 20))
    data = run.slipstream.apply(reader.dataset())
    assert [len(label) for _, label in data] == [BATCH] * BATCHES


@pytest.mark.parametrize("planned_steps", [None, BATCHES])
def test_larger_batches_of_unknown_size_warn(planned_steps, said):
    run = Run(policies=BY_DRIFT, planned_steps=planned_steps)

    def fours():
        return iter(batches().rebatch(4 * BATCH))

    spec = (tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None]))
    data = tf.data.Dataset.from_generator(fours, output_signature=spec)
    data = data.apply(tf.data.experimental.assert_cardinality(math.ceil(BATCHES / 4)))
    run.fit(run.slipstream.apply(data, BATCH))
    words = [w for w in said() if "steps, but only 8 steps were planned" in w]
    assert len(words) == (planned_steps is None) == len(said())
    assert all(".rebatch(n)" in w and "planned_steps" in w for w in words)


def test_unknown_batch_size_raises():
    run = Run(policies=BY_DRIFT)
    data = tf.data.Dataset.from_generator(
        lambda: iter([]),
        output_signature=(tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None])),
    )
    with pytest.raises(ValueError, match=r"Invalid `batch_size`: None"):
        run.slipstream.apply(data)


WEIGHTS = {0: 0.5, 1: 3.0}


def noted(weights):
    """Returns a map function that records the sample weights."""

    def note(x, y, weight):
        tf.numpy_function(lambda w: weights.extend(w.tolist()) or np.int64(0), [weight], tf.int64)
        return x, y, weight

    return note


@pytest.mark.parametrize("settings", [{"keep_rate": 0.25}, {}], ids=str)
def test_class_weights_and_skip_weights_are_multiplied(settings):
    run, weights = (
        Run(policies=slip.SkipExamples(slip.RowDrift(), fraction=0.5, **settings), warmup=0),
        [],
    )
    kept = run.slipstream.apply(batches().repeat(3))
    compute = run.model.compute_loss

    def compute_loss(x, y, y_pred, sample_weight, training=True):
        tf.numpy_function(lambda w: weights.extend(w.tolist()), [sample_weight], [])
        return compute(x, y, y_pred, sample_weight, training=training)

    object.__setattr__(run.model, "compute_loss", compute_loss)
    run.fit(kept, class_weight=WEIGHTS)
    first = run.slipstream.report().reports[0]
    assert first.examples_seen == 5 * BATCH, "no batch was fetched ahead"
    assert run.slipstream.report().examples_skipped > 0
    expected = {0.5, 3.0} | ({2.0, 12.0} if settings else set())
    assert set(weights) <= expected and len(set(weights)) > len(expected) - 2


def test_class_weights_equal_keras():
    results = []
    for is_ours in (True, False):
        run = Run()
        data = run.slipstream.apply(batches()) if is_ours else batches()
        callbacks = [run.slipstream.callback()] if is_ours else []
        run.fit(data, class_weight=WEIGHTS, epochs=2, callbacks=callbacks)
        rows = run.embeddings.store.export_table("a")["rows"].tolist()
        results.append((rows, [w.numpy().tolist() for w in run.model.layers[-1].weights]))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ([0.0, 1.0, 2.0], [0.5, 3.0, 1.0]),
        ([[0], [1], [5]], [0.5, 3.0, 1.0]),
        ([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]], [0.5, 3.0, 1.0]),
    ],
)
def test_class_weights_support_all_label_forms(label, expected):
    from slipstream_tf.sampling.classifier import weigh_classes

    data = tf.data.Dataset.from_tensors((tf.zeros([3, 2]), tf.constant(label)))
    ((_, _, weight),) = weigh_classes(data, WEIGHTS)
    assert weight.numpy().tolist() == expected
    doubled = data.map(lambda x, y: (x, y, tf.constant([[2.0, 4.0]] * 3)))
    ((_, _, weight),) = weigh_classes(doubled, WEIGHTS)
    np.testing.assert_array_equal(weight, np.outer(expected, [2.0, 4.0]))


@pytest.mark.parametrize("wrong", [{}, {-1: 1.0}, {0: float("nan")}, {0.5: 1.0}, 3])
def test_invalid_class_weights_raise(wrong):
    run = Run(policies=BY_DRIFT)
    with pytest.raises(ValueError, match="Invalid `class_weight`"):
        run.slipstream.apply(batches(), class_weight=wrong)


def test_class_weights_require_single_label():
    run = Run(policies=BY_DRIFT)
    data = batches().map(lambda x, y: (x, {"a": y, "b": y}))
    with pytest.raises(ValueError, match=r"Invalid `dataset`.*one label"):
        run.slipstream.apply(data, class_weight=WEIGHTS)


def test_summary_shows_current_window():
    run = Run(policies=BY_DRIFT, steps=BATCHES + 4)
    run.fit(run.slipstream.apply(batches()))
    words = f"The current window has {BATCHES} of {BATCHES + 4} steps, {COUNT} examples"
    assert words in str(run.slipstream.report())
    assert len(run.slipstream.report().reports) == 0, "it was not ended"
    run.fit(run.slipstream.apply(batches()))
    assert [r.step for r in run.slipstream.report().reports] == [BATCHES + 4]
    assert f"{BATCHES - 4} of {BATCHES + 4} steps" in str(run.slipstream.report())
    run.slipstream.end_window()
    assert "current window" not in str(run.slipstream.report())


POLICIES = {
    "predicted loss": {
        "policies": slip.SkipExamples(score=slip.PredictedLoss("label"), fraction=0.5)
    },
    "drift": {"policies": slip.SkipExamples(score=slip.RowDrift(), fraction=0.5, keep_rate=0.5)},
    "drift within an AUC loss": {
        "policies": slip.SkipExamples(score=slip.RowDrift(), fraction=0.5, keep_rate=0.5),
        "max_auc_loss": 0.5,
    },
    "deferring within an AUC loss": {
        "policies": slip.DeferGradients(slip.Movement()),
        "max_auc_loss": 0.01,
    },
    "mask": {"policies": slip.MaskGradients()},
}


def element(form):
    """Returns batches in a feature form and the matching arguments of `apply`."""

    def flat(x, y):
        return {"a": x[:, 0], "b": x[:, 1], "price": tf.cast(x, tf.float32)}, y

    def pair(x, y):
        return (x, tf.cast(x, tf.float32)), y

    if form == "flat":
        return batches().map(flat), {}
    return batches().map(pair), {"get_keys": lambda x, *_: x[0]}


def with_numbers(form, embeddings):
    """Returns a functional model with keys and numbers as inputs."""
    price = keras.Input((2,), name="price")
    if form == "flat":
        inputs = {name: keras.Input((), name=name, dtype="int64") for name in ("a", "b")}
        vectors = list(embeddings(dict(inputs)).values())
        inputs["price"] = price
    else:
        inputs = [keras.Input((2,), name="keys", dtype="int64"), price]
        vectors = [keras.layers.Flatten()(embeddings(inputs[0]))]
    both = keras.layers.Concatenate()([*vectors, price])
    return slip.keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(both))


@pytest.mark.parametrize("form", ["flat", "tuple"])
@pytest.mark.parametrize("settings", POLICIES.values(), ids=POLICIES)
def test_functional_models_support_every_policy(form, settings):
    run = Run()
    run.embeddings = EmbeddingCollection([Table("a", 4), Table("b", 4)], optimizers.SGD(0.05))
    run.slipstream = Slipstream(run.embeddings, window=Window(steps=5, warmup=0), **settings)
    run.model = with_numbers(form, run.embeddings)
    run.model.compile("sgd", "binary_crossentropy")
    data, options = element(form)
    with warnings.catch_warnings():
        # Keras warns if the features do not match the model's inputs.
        warnings.filterwarnings("error", "The structure of `inputs`")
        kept = run.slipstream.apply(data, **options)
        run.fit(kept, epochs=2, validation_data=data.take(2))
    run.slipstream.end_window()
    assert run.slipstream.report().examples_seen == 2 * COUNT
    assert run.slipstream.settings.needs_losses == run.slipstream.are_losses_recorded
