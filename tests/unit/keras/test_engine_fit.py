"""Tests the engine with each policy in `fit` on generated data."""

from __future__ import annotations

import glob
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from engine_settings import engine_arguments
from rank_simulation import simulate_ranks

import slipstream_tf as slip
from slipstream_tf import Table, initializers, optimizers
from slipstream_tf.data.readers.generator import GeneratedReader
from slipstream_tf.keras import EmbeddingCollection, Slipstream

INPUTS, BATCH, FIELDS, DENSE, DIM = 1_600, 40, 3, 2, 4
STEPS = INPUTS // BATCH
STATES = ("warming", "varying", "saturated", "probing")
# Settings that require losses. The bound is so large that only the fraction limits skipping.
BOUNDED = {"skip_keep_rate": 0.5, "max_auc_loss": 10.0}


def dataset():
    reader = GeneratedReader(
        INPUTS, "train", BATCH, fields=FIELDS, dense=DENSE, cardinalities=(6, 8, 10)
    )
    batches = reader.dataset().rebatch(BATCH, drop_remainder=True)
    # The engine derives its warm-up from the number of batches.
    return batches.apply(tf.data.experimental.assert_cardinality(STEPS))


class Run:
    """A model and, if policies are given, its engine.

    `fit` trains the model and closes the last window.
    """

    def __init__(self, *policies, optimizer=None, **settings):
        keras.utils.set_random_seed(3)
        tables = [
            Table(f"c{i + 1}", DIM, initializer=initializers.RandomUniform(seed=i))
            for i in range(FIELDS)
        ]
        self.embeddings = EmbeddingCollection(tables, optimizer or optimizers.SGD(0.05))
        self.model = slip.models.DLRM(self.embeddings, DENSE, bottom=(8, DIM), top=(8, 1))
        self.model.compile(optimizer=keras.optimizers.SGD(0.05), loss="binary_crossentropy")
        self.slipstream = None
        if policies:
            settings.setdefault("window_steps", 5)
            if {"skip_examples", "mask_gradients"} & set(policies):
                settings["fraction"] = 0.5
            self.slipstream = Slipstream(self.embeddings, **engine_arguments(*policies, **settings))

    @property
    def words(self):
        return str(self.slipstream.report())

    def fit(self, data=None, epochs=1, log_dir=None, before=(), after=(), **kwargs):
        data = dataset() if data is None else data
        callbacks = [*before, *after]
        self.trained, self.weights = 0, []
        if self.slipstream is not None:
            data = self.slipstream.apply(data).map(self._count)
            callbacks = [*before, self.slipstream.callback(log_dir), *after]
        self.model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False, **kwargs)
        if self.slipstream is not None:
            self.slipstream.end_window()
        return self

    def _count(self, *element):
        def note(label, weight):
            self.trained += label.size
            self.weights.extend(weight.tolist())
            return np.int64(0)

        weight = element[2] if len(element) == 3 else tf.zeros([0])
        noted = tf.numpy_function(note, [element[1], weight], tf.int64)
        with tf.control_dependencies([noted]):
            return tf.nest.map_structure(tf.identity, element)

    def assert_account(self, seen=INPUTS):
        savings = self.slipstream.report()
        assert savings.examples_seen == seen == self.trained + savings.examples_skipped
        assert all(not r.examples_skipped for r in savings.reports if r.is_warming_up)
        return savings

    def state(self):
        """Returns all trained values: dense weights, rows and slots."""
        exported = [self.embeddings.store.export_table(t.name) for t in self.embeddings.tables]
        parts = [table[name] for table in exported for name in ("keys", "rows", "slots")]
        dense = [w for w in self.model.get_weights() if w.dtype == np.float32]
        return dense + parts


def assert_same(one, other, **tolerance):
    for mine, others in zip(one.state(), other.state(), strict=True):
        np.testing.assert_allclose(mine, others, **{"rtol": 0, "atol": 0, **tolerance})


def test_fit_skips_examples_by_drift():
    run = Run("skip_examples").fit(epochs=2)
    savings = run.assert_account(2 * INPUTS)
    assert savings.examples_skipped > 50
    assert f"{savings.examples_skipped:,} examples (" in run.words
    assert "have been skipped" in run.words


def test_fit_masks_gradients():
    run = Run("mask_gradients").fit()
    savings = run.assert_account()
    rows = savings.rows
    assert savings.examples_skipped == 0 < rows.masked and rows.sent == rows.offered - rows.masked
    assert f"{rows.masked:,} gradient rows (" in run.words


def test_deferring_sends_fewer_rows_and_counts_all():
    run = Run("defer_gradients", defer_movement=0.002)
    simulate_ranks(run.embeddings.store, 4)
    run.fit()
    rows = run.assert_account().rows
    assert 0 < rows.sent < rows.offered and rows.masked == 0 and rows.due_by_movement > 0
    assert rows.deferred >= rows.deferred_now == deferred_rows(run) > 0
    assert "been sent" in run.words and "MiB have been saved" in run.words


def test_evaluation_flushes_and_equals_plain_training():
    # Train single steps, because each evaluation applies the deferred gradients.
    settings = {"defer_movement": 1e9, "defer_max_age": 10_000, "warmup": 0}
    deferred, plain = Run("defer_gradients", **settings), Run()
    for run in (deferred, plain):
        run.losses = []
        for batch in dataset().take(5):
            run.model.train_on_batch(*batch)
            if run is deferred:
                before = deferred_rows(deferred)
                assert before > 0
            run.losses.append(run.model.evaluate(dataset().take(2), verbose=0))
            assert deferred_rows(run) == 0
    np.testing.assert_allclose(deferred.losses, plain.losses, rtol=1e-5)
    assert_same(deferred, plain, rtol=1e-5, atol=1e-6)


def deferred_rows(run):
    return sum(
        run.embeddings.store.update_counts(t.name).deferred_now for t in run.embeddings.tables
    )


def test_all_gradients_are_applied_by_end_of_training():
    """With SGD, deferral changes the times of updates but not their sum."""
    run = Run("defer_gradients", defer_movement=1e9, defer_max_age=10_000, warmup=0)
    run.fit(dataset().take(8))
    assert deferred_rows(run) > 0
    rows = run.slipstream.report().rows
    assert rows.sent == 0 and rows.deferred == rows.offered
    run.embeddings.store.flush()
    assert deferred_rows(run) == 0
    counts = [run.embeddings.store.update_counts(t.name) for t in run.embeddings.tables]
    assert sum(c.flushed for c in counts) == sum(c.sent for c in counts) == rows.deferred_now


def test_fit_skips_examples_and_defers_gradients():
    run = Run("skip_examples", "defer_gradients", defer_movement=0.02, skip_keep_rate=0.25).fit()
    savings = run.assert_account()
    assert savings.examples_skipped > 50 and 0 < savings.rows.sent < savings.rows.offered
    assert set(run.weights) == {1.0, 4.0}
    words = run.words
    assert "been skipped; " in words and "been sent" in words


@pytest.mark.parametrize(
    "policies, optimizer",
    [
        (("skip_examples",), optimizers.SGD(0.05)),
        (("mask_gradients",), optimizers.Adam(0.01)),
        (("skip_examples", "defer_gradients"), optimizers.Adam(0.01)),
    ],
    ids=("skip", "mask", "skip+defer"),
)
def test_dry_run_is_bitwise_equal_to_training_without_engine(policies, optimizer):
    run = Run(*policies, optimizer=optimizer, dry_run=True).fit()
    assert_same(run, Run(optimizer=optimizer).fit())
    savings = run.assert_account()
    assert savings.examples_skipped == 0
    words = run.words
    assert "would have been" in words and " have been" not in words.replace("would have been", "")
    if "skip_examples" in policies:
        assert savings.examples_skippable > 0


def test_cost_estimate_requires_losses_and_changes_nothing():
    policies = ("skip_examples", "defer_gradients")
    settings = {"defer_movement": 0.02, "window_steps": 3}
    run = Run(*policies, dry_run=slip.DryRun(estimates_cost=True), **settings).fit()
    assert_same(run, Run().fit())
    assert all(report.auc is not None for report in run.slipstream.tracker.reports[:-1])
    examples, rows = run.slipstream.report().dry_run.savings
    assert examples.saved > 0 and 0 <= examples.min_cost < examples.max_cost
    # A movement of 0.02 is 0.4 learning rates, and one learning rate costs 0.002 to 0.012 AUC.
    assert (rows.min_cost, rows.max_cost) == pytest.approx((0.4 * 0.002, 0.4 * 0.012))
    assert str(examples) in run.words
    blind = Run(*policies, dry_run=True, **settings).fit().slipstream.report().dry_run.savings[0]
    assert blind.saved == examples.saved and blind.max_cost is None and "no losses" in blind.basis


def test_only_dry_run_has_estimate():
    assert Run("skip_examples").slipstream.report().dry_run is None
    assert not Run("skip_examples", dry_run=True).slipstream.report().dry_run.savings


def test_keep_rate_keeps_weighted_subsample():
    run = Run("skip_examples", skip_keep_rate=0.25).fit(epochs=2)
    savings = run.assert_account(2 * INPUTS)
    assert set(run.weights) == {1.0, 4.0}
    assert run.weights.count(4.0) == savings.examples_kept
    assert savings.examples_kept + savings.examples_skipped == savings.examples_skippable > 50
    assert f"{savings.examples_kept:,} more were skippable" in run.words


def test_max_auc_loss_receives_losses():
    run = Run("skip_examples", skip_keep_rate=0.5, max_auc_loss=0.05).fit()
    reports = run.slipstream.tracker.reports
    assert all(report.log_loss is not None for report in reports if report.examples_seen)
    assert all(report.auc_loss_plan for report in reports[1:])
    assert "- max_auc_loss: " in run.words
    run.assert_account()


def keys_alone(features, *rest):
    return (features["keys"], *rest)


def network(embeddings, kind=slip.keras.Model):
    """Returns a functional model on the key matrix."""
    inputs = keras.Input((FIELDS,), dtype="int64", name="keys")
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(embeddings(inputs)))
    return kind(inputs, outputs)


@pytest.mark.parametrize("form", ["keys", "matrix"])
def test_functional_model_records_losses(form):
    run = Run("skip_examples", **BOUNDED)
    run.model = network(run.embeddings)
    run.model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    data = dataset().map(keys_alone)
    if form == "keys":
        data = data.map(lambda keys, y: ({"keys": keys}, y))
    savings = run.fit(data, epochs=2).assert_account(2 * INPUTS)
    assert savings.examples_skipped > 50
    last = savings.reports[-2]
    assert last.log_loss is not None and last.auc is not None


def test_plain_model_raises_if_losses_are_required():
    run = Run("skip_examples", **BOUNDED)
    run.model = network(run.embeddings, keras.Model)
    run.model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"Invalid `model`: \"Functional.*slip\.keras\.Model\("):
        run.fit(dataset().map(keys_alone))


def test_plain_model_trains_if_losses_are_not_required():
    run = Run("skip_examples", "defer_gradients", defer_movement=0.02)
    run.model = network(run.embeddings, keras.Model)
    run.model.compile("sgd", "mse")
    assert run.fit(dataset().map(keys_alone)).assert_account().examples_skipped > 50


def test_max_auc_loss_requires_binary_cross_entropy():
    run = Run("skip_examples", max_auc_loss=0.01)
    run.model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"Invalid `loss`: 'mse'.*binary cross-entropy"):
        run.fit()


class OwnStep(slip.keras.Model):
    """Model with a train_step that does not call compute_loss."""

    tells = False

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            losses = keras.losses.binary_crossentropy(y[:, None], predicted, from_logits=True)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        if self.tells:
            self.record_losses(x, losses, y)
        return {"loss": loss}


@pytest.mark.parametrize("tells", [False, True])
def test_custom_step_without_losses_warns_once(tells):
    run = Run("skip_examples", **BOUNDED)
    run.model = network(run.embeddings, OwnStep)
    run.model.tells = tells
    run.model.compile("sgd")
    data = dataset().map(keys_alone)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        run.fit(data)
    said = [w for w in caught if "no step has recorded losses" in str(w.message)]
    assert len(said) == (0 if tells else 1)
    assert (run.slipstream.report().reports[-2].log_loss is not None) == tells


def test_losses_are_recorded_with_features_or_skippable_flags():
    run, skippable = Run("skip_examples", **BOUNDED), np.array([True, False])
    keys = np.zeros((2, FIELDS))
    reported = [0.5, 0.25], [0.0, 1.0]
    run.slipstream.record_losses({"keys": keys, "skippable": skippable}, *reported)
    run.slipstream.record_losses(None, *reported, skippable=skippable)
    run.slipstream.record_losses(keys, *reported)
    found = run.slipstream.tracker.classifier.take_loss_statistics()
    assert (found.skippable, found.weight) == (2, 6.0)
    assert found.skippable_squared_residuals == pytest.approx(2 * np.expm1(-0.5) ** 2)


def events_in(folder):
    """Reads the event file in a folder as TensorBoard does.

    Returns:
        A dictionary tag -> step -> tensor, and a dictionary tag -> plugin name.
    """
    (path,) = glob.glob(str(folder / "*tfevents*"))
    found, plugins = {}, {}
    for event in tf.compat.v1.train.summary_iterator(path):
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = tf.make_ndarray(value.tensor)
            plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
    return found, plugins


def test_tensorboard_events_are_readable(tmp_path):
    run = Run("skip_examples")
    run.fit(log_dir=tmp_path)
    found, plugins = events_in(tmp_path / "slipstream")
    # The last window ended by a direct call, which the callback did not log.
    reports = run.slipstream.tracker.reports[:-1]
    assert len(reports) >= STEPS // 2 // 5
    for tag, attribute in (
        ("examples/seen", "examples_seen"),
        ("examples/skipped", "examples_skipped"),
        ("examples/skipped_fraction", "skipped_fraction"),
        ("keys/hot", "hot_keys"),
        ("keys/saturated", "saturated_keys"),
        ("keys/saturated_fraction", "saturated_fraction"),
        ("keys/hot_set_overlap", "hot_set_overlap"),
        ("threshold", "threshold"),
    ):
        expected = {report.step: np.float32(getattr(report, attribute)) for report in reports}
        assert found[f"saturation/{tag}"] == expected
        assert plugins[f"saturation/{tag}"] == "scalars"
    shares = [found[f"saturation/states/{state}_fraction"] for state in STATES]
    for report in reports:
        assert sum(fraction[report.step] for fraction in shares) == pytest.approx(1.0)

    drift = found.pop("saturation/log10_drift")
    assert plugins["saturation/log10_drift"] == "histograms"
    assert {step: int(buckets[:, 2].sum()) for step, buckets in drift.items()} == {
        report.step: report.hot_keys - report.evicted - report.anomalies
        for report in reports
        if report.hot_keys
    }
    for buckets in drift.values():
        assert np.isfinite(buckets).all()
        np.testing.assert_allclose(buckets[:, 1] - buckets[:, 0], 0.25, atol=1e-9)
        assert (np.diff(buckets[:, 0]) > 0).all()
    assert all(np.isfinite(list(values.values())).all() for values in found.values())


def test_tensorboard_reads_events(tmp_path):
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulators = pytest.importorskip(module)
    run = Run("skip_examples")
    run.fit(log_dir=tmp_path)
    accumulator = accumulators.EventAccumulator(str(tmp_path / "slipstream"))
    accumulator.Reload()
    tags = accumulator.Tags()["tensors"]
    assert {"saturation/threshold", "saturation/log10_drift"} <= set(tags)
    steps = [event.step for event in accumulator.Tensors("saturation/threshold")]
    assert steps == [report.step for report in run.slipstream.tracker.reports[:-1]]


@pytest.mark.parametrize("is_first", [True, False])
def test_directory_defaults_to_tensorboard_callback(tmp_path, is_first):
    board = keras.callbacks.TensorBoard(str(tmp_path), write_graph=False)
    run = Run("skip_examples")
    run.fit(before=[] if is_first else [board], after=[board] if is_first else [])
    found, _ = events_in(tmp_path / "slipstream")
    assert "saturation/threshold" in found
    assert (tmp_path / "train").is_dir(), "Keras wrote beside it"


def test_no_events_are_written_without_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Run("skip_examples").fit()
    assert list(tmp_path.iterdir()) == []
