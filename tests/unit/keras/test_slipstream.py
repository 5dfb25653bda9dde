"""Tests of `Slipstream` on data, in `fit`, by hand, and its ledger."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from engine_settings import engine_arguments, engine_settings

import slipstream_tf as slip
from slipstream_tf import RowDrift, SkipExamples, Table, Window, models, optimizers
from slipstream_tf.data.readers import registry
from slipstream_tf.engine.report import WindowReport
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.keras import EmbeddingCollection, SaturationCallback, Slipstream
from slipstream_tf.telemetry.savings_report import SavingsReport

BATCH_SIZE = 8


def make_embeddings():
    return EmbeddingCollection([Table("a", 4), Table("b", 4)], optimizers.SGD(0.01), name="tables")


def make_model(embeddings):
    inputs = keras.Input((2,), dtype="int64")
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(embeddings(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="sgd", loss="mse")
    return model


def make_data(batches, form="matrix"):
    generator = np.random.default_rng(0)
    keys = np.minimum(generator.zipf(1.5, (batches * BATCH_SIZE, 2)), 50)
    labels = np.ones((len(keys), 1), np.float32)
    features = {"matrix": keys, "keys": {"keys": keys}}[form]
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH_SIZE)


def make_engine(embeddings, **settings):
    """Returns an engine that skips half of the examples by drift."""
    defaults = {"window_steps": 5, "fraction": 0.5, "warmup": 0}
    chosen = engine_arguments("skip_examples", **{**defaults, **settings})
    return Slipstream(embeddings, **chosen)


@pytest.mark.parametrize("epochs", [1, 3])
def test_fit_skips_and_counts_every_trained_step(epochs):
    embeddings = make_embeddings()
    slipstream = make_engine(embeddings)
    data = make_data(40)
    make_model(embeddings).fit(
        slipstream.apply(data, batch_size=BATCH_SIZE),
        callbacks=[slipstream.callback()],
        validation_data=make_data(3),
        epochs=epochs,
        verbose=0,
    )
    report = slipstream.end_window()
    trained = int(embeddings.store.export_table("a")["steps"][0])
    assert report.step == trained
    savings = slipstream.report()
    assert savings.examples_seen == epochs * 40 * BATCH_SIZE
    assert 0 < savings.examples_skipped < savings.examples_seen
    kept = savings.examples_seen - savings.examples_skipped
    assert (trained - epochs) * BATCH_SIZE < kept <= trained * BATCH_SIZE


def train_on(batches, ahead=True, **settings):
    """Trains on the kept batches.

    Returns:
        The labels of each batch, and the reports.
    """
    keras.utils.set_random_seed(0)
    embeddings = make_embeddings()
    slipstream = make_engine(embeddings, **settings)
    keys = np.minimum(np.random.default_rng(0).zipf(1.5, (batches * BATCH_SIZE, 2)), 50)
    pairs = tf.data.Dataset.from_tensor_slices(({"keys": keys}, np.arange(len(keys))))
    trained = []
    data = slipstream.apply(pairs.batch(BATCH_SIZE), BATCH_SIZE, ahead=ahead)
    for features, labels, *_ in data:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(embeddings(features["keys"], training=True) ** 2)
        tape.gradient(loss, embeddings.trainable_variables)
        trained.append(labels.numpy().tolist())
        slipstream.step()
    return trained, slipstream.tracker.reports


@pytest.mark.parametrize("keep", [0.0, 0.3])
def test_look_ahead_skips_same_examples(keep):
    trained, reports = train_on(60, skip_keep_rate=keep)
    alone, reports_alone = train_on(60, ahead=False, skip_keep_rate=keep)
    assert alone == trained
    assert len(reports) == len(reports_alone) > 3
    for one, other in zip(reports, reports_alone, strict=True):
        one, other = (dict(r.to_dict(), seconds=0, traffic=0) for r in (one, other))
        assert one == other
    assert sum(r.examples_skipped for r in reports) > 0


def test_end_window_waits_for_batch_in_progress():
    embeddings = make_embeddings()
    slipstream = make_engine(embeddings, window_steps=100)
    keys = np.arange(40 * BATCH_SIZE).reshape(-1, 2) % 50
    delay = 0.05

    def slow(features):
        time.sleep(delay)
        return features

    data = tf.data.Dataset.from_tensor_slices(keys).batch(BATCH_SIZE)
    data = data.map(
        lambda part: {"keys": tf.ensure_shape(tf.numpy_function(slow, [part], tf.int64), [None, 2])}
    )
    batches = iter(slipstream.apply(data, BATCH_SIZE))
    for made in (2, 3, 4):
        next(batches)
        assert slipstream.end_window().examples_seen == BATCH_SIZE * (2 if made == 2 else 1)
    slipstream.wait_until_idle()
    assert slipstream.end_window().examples_seen == 0


def test_dry_run_samples_batches_of_long_windows():
    # Four examples for each of the 8 sample entries suffice, which is 32 of 320 examples. Therefore
    # the dry run counts one batch in ten.
    settings = {"window_steps": 40, "sample": 8}
    trained, reports = train_on(160, dry_run=True, **settings)
    assert len(trained) == 160
    assert [r.examples_seen for r in reports] == [320] * 4
    counts = [r.examples_skippable for r in reports] + [r.hot_examples for r in reports]
    assert any(counts) and all(count % 10 == 0 for count in counts)
    _, exact = train_on(160, dry_run=slip.DryRun(estimates_cost=True), **settings)
    assert any(r.hot_examples % 10 for r in exact), "each one is needed beside its loss"
    _, short = train_on(160, dry_run=True, window_steps=4, sample=8)
    assert any(r.hot_examples % 10 for r in short)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_callback_counts_steps_with_any_steps_per_execution(steps_per_execution):
    embeddings = make_embeddings()
    model = make_model(embeddings)
    model.compile(optimizer="sgd", loss="mse", steps_per_execution=steps_per_execution)
    slipstream = Slipstream(embeddings, window=Window(5))
    callback = slipstream.callback()
    for epochs in (2, 1):  # The second `fit` continues the optimizer's iterations.
        model.fit(make_data(7), callbacks=[callback], epochs=epochs, verbose=0)
    # Not exactly 3 * 7, because Keras 3.3 runs past the end of the data with multiple steps per
    # execution.
    assert slipstream.end_window().step == int(model.optimizer.iterations.numpy()) >= 3 * 7


def test_evaluate_and_predict_are_not_counted():
    embeddings = make_embeddings()
    model = make_model(embeddings)
    slipstream = make_engine(embeddings)
    model.evaluate(make_data(7), callbacks=[slipstream.callback()], verbose=0)
    model.predict(make_data(7), callbacks=[slipstream.callback()], verbose=0)
    assert slipstream.end_window().step == 0


def test_step_ends_windows():
    slipstream = make_engine(make_embeddings())
    reports = [slipstream.step() for _ in range(10)]
    assert [i for i, report in enumerate(reports) if report is not None] == [4, 9]
    assert slipstream.step(steps=5).step == 15
    assert slipstream.end_window().window == 3
    assert slipstream.steps == 15, "only trained steps are counted"
    assert len(slipstream.report().reports) == 4


def test_classifier_in_custom_step_follows_engine():
    embeddings = make_embeddings()
    # A dry run makes the same decisions but drops no examples, so that training sees every batch.
    chosen = {"threshold": 0.1, "skip_alpha": 0.5, "window_steps": 5, "warmup": 0}
    slipstream = Slipstream(embeddings, **engine_arguments("skip_examples", dry_run=True, **chosen))
    on_device = slipstream.classifier_on("CPU:0")
    keys = next(iter(make_data(1)))[0]
    shares = []
    for _ in range(25):
        embeddings(keys, training=True)
        host, device = slipstream.observe(keys), on_device.classify(keys, slipstream.specs)
        for one, other in zip(host, device, strict=True):
            assert one.numpy().tolist() == other.numpy().tolist()
        shares.append(float(np.mean(device.skippable)))
        slipstream.step()
    assert shares[0] == 0.0 and shares[-1] > 0.0
    with pytest.raises(ValueError, match=r"`score`.*RowDrift"):
        by_losses = slip.SkipExamples(slip.PredictedLoss("label"))
        Slipstream(make_embeddings(), by_losses).classifier_on("CPU:0")
    with pytest.raises(ValueError, match=r"`policies`.*Slipstream\.observe.*Slipstream\.apply"):
        make_engine(make_embeddings()).observe(keys)


def observed(slipstream: Slipstream, batch: int, is_graph: bool = False) -> list[int]:
    """Observes a batch and returns the positions of the examples with a finite score."""
    keys = tf.ones([batch, 2], tf.int64)
    observe = tf.function(slipstream.observe) if is_graph else slipstream.observe
    score = observe(keys).score.numpy()
    return np.flatnonzero(np.isfinite(score)).tolist()


def make_observer(**settings) -> Slipstream:
    slipstream = Slipstream(make_embeddings(), window=Window(200, sample=100), **settings)
    slipstream.tracker.classifier.set_drift([0, 1], [1, 1], [0.5, 0.5])
    return slipstream


@pytest.mark.parametrize("is_graph", [False, True])
def test_large_batches_are_sampled_when_observed(is_graph: bool):
    slipstream = make_observer()
    assert len(observed(slipstream, 4095, is_graph)) == 4095
    rows = observed(slipstream, 3 * 4096, is_graph)
    assert len(rows) in range(2047, 2050) and rows != list(range(rows[0], 3 * 4096, 6))
    saved = slipstream.state()
    following = observed(slipstream, 9000, is_graph)
    assert len(following) in range(2249, 2252)
    resumed = make_observer()
    resumed.restore([saved])
    resumed.tracker.classifier.set_drift([0, 1], [1, 1], [0.5, 0.5])
    assert observed(resumed, 9000, is_graph) == following
    report = resumed.end_window()
    assert report.examples_seen == 4095 + 3 * 4096 + 9000


@pytest.mark.parametrize(
    ("settings", "batch_size", "stride"),
    [
        ({}, None, 1),
        ({}, 4095, 1),
        ({}, 65536, 32),
        ({"window": Window(1, sample=1 << 15)}, 65536, 2),
        ({"window": Window(1, sample=1 << 20)}, 65536, 1),
        ({"dry_run": slip.DryRun(estimates_cost=True)}, 65536, 1),
    ],
)
def test_stride_of_observation_depends_on_needs(settings, batch_size, stride: int):
    settings = {"window": Window(200), "policies": slip.MaskGradients(), **settings}
    assert Slipstream(make_embeddings(), **settings)._stride(batch_size) == stride


@pytest.mark.parametrize("form", ["matrix", "keys"])
def test_keys_are_found_in_common_structures(form):
    slipstream = make_engine(make_embeddings())
    list(slipstream.apply(make_data(2, form), batch_size=BATCH_SIZE))
    assert slipstream.end_window().examples_seen == 2 * BATCH_SIZE


def test_get_keys_extracts_keys_from_other_structures():
    slipstream = make_engine(make_embeddings())
    data = make_data(2).map(lambda keys, label: {"k": keys, "y": label})
    list(slipstream.apply(data, BATCH_SIZE, get_keys=lambda element: element["k"]))
    assert slipstream.end_window().examples_seen == 2 * BATCH_SIZE


def test_missing_callback_warns_once():
    slipstream = make_engine(make_embeddings())
    with pytest.warns(RuntimeWarning, match=r"10 batches .*`slipstream\.callback\(\)`") as caught:
        list(slipstream.apply(make_data(30), batch_size=BATCH_SIZE))
    assert len(caught) == 1


def test_counted_steps_do_not_warn():
    slipstream = make_engine(make_embeddings())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in slipstream.apply(make_data(30), batch_size=BATCH_SIZE):
            slipstream.step()


def test_loss_scale_optimizer_raises():
    embeddings = make_embeddings()
    model = make_model(embeddings)
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse")
    slipstream = make_engine(embeddings)
    with pytest.raises(ValueError, match="Invalid `optimizer`: 'LossScaleOptimizer'"):
        model.fit(make_data(2), callbacks=[slipstream.callback()], verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embeddings": keras.layers.Embedding(3, 4)}, "`embeddings`.*EmbeddingCollection"),
        ({"policies": 0.3}, "`policies`: 0.3 for Slipstream.*DeferGradients"),
        ({"policies": [slip.DeferGradients]}, "`policies`.*a sequence of policies"),
        ({"window": 5}, r"`window`: 5 for Slipstream.*Window\("),
        ({"hot_set": "256MB"}, r"`hot_set`: '256MB' for Slipstream.*HotSet\("),
        ({"saturation": 0.1}, r"`saturation`: 0.1 for Slipstream.*Saturation\("),
        ({"max_auc_loss": 0}, "`max_auc_loss`: 0 for Slipstream.*> 0"),
        ({"dry_run": "yes"}, r"`dry_run`: 'yes' for Slipstream.*DryRun\("),
        ({"features": {"f": "a"}}, "`features`.*Slipstream with a layer"),
        ({"comm": slip.distributed.SingleProcess()}, "`comm`.*Slipstream with a layer"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        Slipstream(**{"embeddings": make_embeddings(), **arguments})


def test_public_names_exist():
    assert slip.Slipstream is Slipstream
    assert slip.keras.EmbeddingCollection is EmbeddingCollection
    assert isinstance(Slipstream(make_embeddings()).callback(), SaturationCallback)
    assert Slipstream(make_embeddings()).settings == EngineSettings()


def report(window, seen, skipped):
    return WindowReport(
        window=window,
        step=10 * (window + 1),
        is_warming_up=False,
        hot_keys=20,
        snapshot_bytes=320,
        evicted=0,
        anomalies=0,
        drift_quantiles={},
        threshold=0.25,
        is_threshold_capped=window == 1,
        is_skipping=True,
        saturated_keys=5,
        examples_seen=seen,
        examples_skipped=skipped,
        hot_examples=seen,
        next_hot_keys=20,
        hot_set_overlap=1.0,
        seconds=0.5,
    )


def test_report_sums_windows_and_prints_table():
    found = SavingsReport(
        [report(0, 3000, 0), report(1, 1000, 400)], engine_settings("skip_examples")
    )
    assert found.skipped_fraction == 0.1
    values = json.loads(json.dumps(found.to_dict()))
    assert values["examples_skipped"] == 400
    assert [window["skipped_fraction"] for window in values["windows"]] == [0.0, 0.4]
    lines = found.table().splitlines()
    assert len(lines) == 5
    assert "40.0%" in lines[3]
    assert "0.25 (cap)" in lines[3]
    parts = ("400 of 4,000 examples skipped (10.0%)", "2 window ends took 1.00 s")
    assert lines[-1] == "; ".join(parts)


def test_report_without_windows_is_empty():
    empty = SavingsReport([], engine_settings("skip_examples"))
    assert empty.to_dict()["skipped_fraction"] == 0.0
    assert "0 of 0 examples skipped" in empty.table()


def test_planned_steps_equal_training_steps():
    slipstream = make_engine(make_embeddings(), warmup=0.25)
    data = make_data(80).unbatch().batch(4 * BATCH_SIZE, drop_remainder=True)
    data = data.apply(tf.data.experimental.assert_cardinality(20))
    slipstream.apply(data, batch_size=BATCH_SIZE)
    slipstream.plan.add_epochs(1)
    assert slipstream.tracker.warmup_steps == 20
    slipstream.plan.add_epochs(2)
    assert slipstream.tracker.warmup_steps == 60, "another fit is more training"


@pytest.mark.parametrize(
    "policy, settings, message",
    [
        ("defer_gradients", {}, "`until`: 'Movement'"),
        ("mask_gradients", {"mask_decay_moments": True}, "`decay_moments`: True"),
    ],
)
def test_unsupported_store_raises_at_construction(policy, settings, message):
    store = slip.tables.VariableStore({"a": tf.Variable(tf.zeros([10, 4]))})
    with pytest.raises(ValueError, match=f"Invalid {message}.*VariableStore"):
        Slipstream(store, features={"f": "a"}, **engine_arguments(policy, **settings))


def test_single_policy_and_budget_need_no_list():
    policy = SkipExamples(RowDrift())
    one = Slipstream(make_embeddings(), policy, max_auc_loss=0.001)
    assert one.settings == Slipstream(make_embeddings(), [policy], max_auc_loss=0.001).settings


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


def test_default_adagrad_outperforms_keras_defaults() -> None:
    assert optimizers.Adagrad(0.05) == optimizers.Adagrad(0.05, 0.0, 1e-7)
    by_default = auc_of(None)
    assert by_default > 0.70, by_default
    assert by_default > auc_of(optimizers.Adagrad(0.05, 0.1, 1e-7)) + 0.1


RULE = slip.optimizers.SGD(0.1)
EXAMPLES, BATCH = 1024, 32


def layer(*names, **kwargs):
    return slip.keras.EmbeddingCollection([slip.Table(name, 4) for name in names], RULE, **kwargs)


def data():
    random = np.random.default_rng(0)
    keys = {name: random.zipf(1.5, EXAMPLES) % 50 for name in ("a", "b")}
    labels = (keys["a"] + keys["b"]) % 2
    return tf.data.Dataset.from_tensor_slices((keys, np.float32(labels))).batch(BATCH, True)


def train(layers, **settings):
    """Trains a model.

    Returns:
        The engine, and the rows of the tables by key.
    """
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("a", "b")}
    rows = {}
    for one in layers:
        rows.update(one({spec.name: inputs[spec.name] for spec in one.specs}))
    joined = keras.layers.Concatenate()([rows["a"], rows["b"]])
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(joined))
    model.compile("sgd", "binary_crossentropy")
    given = layers[0] if len(layers) == 1 else layers
    settings = {"window": slip.Window(steps=4, warmup=4), **settings}
    slipstream = slip.Slipstream(given, **settings)
    model.fit(slipstream.apply(data()), callbacks=[slipstream.callback()], verbose=0)
    tables = {t.name: one.store.export_table(t.name) for one in layers for t in one.tables}
    return slipstream, tables


@pytest.mark.parametrize(
    "policies",
    [
        [slip.SkipExamples(slip.RowDrift())],
        [slip.DeferGradients(slip.Movement(0.05))],
        [slip.MaskGradients(fraction=0.5)],
    ],
    ids=lambda policies: type(policies[0]).__name__,
)
def test_two_layers_equal_one_layer(policies):
    (one, of_one), (two, of_two) = (
        train(layers, policies=policies) for layers in ([layer("a", "b")], [layer("a"), layer("b")])
    )
    assert one.tracker.reports[-1].step == two.tracker.reports[-1].step
    for before, after in zip(one.tracker.reports, two.tracker.reports, strict=True):
        assert before.threshold == after.threshold
        assert [t.rows for t in before.tables] == [t.rows for t in after.tables]
        assert before.examples_skipped == after.examples_skipped
    assert not two.report().no_savings_reason()
    for name, contents in of_one.items():
        for part in ("keys", "rows"):
            np.testing.assert_array_equal(contents[part], of_two[name][part])


def test_checkpoint_of_two_layers_is_restored(tmp_path):
    layers = [layer("a"), layer("b")]
    slipstream, _ = train(layers, policies=slip.SkipExamples(slip.RowDrift()))
    path = tf.train.Checkpoint(layers=layers, slipstream=slipstream).save(tmp_path / "c")
    again = [layer("a"), layer("b")]
    other = slip.Slipstream(
        again,
        policies=slip.SkipExamples(slip.RowDrift()),
        window=slip.Window(steps=4, warmup=4),
    )
    tf.train.Checkpoint(layers=again, slipstream=other).restore(path).assert_consumed()
    assert other.tracker.state()["loop"] == slipstream.tracker.state()["loop"]
    assert len(other.tracker.reports) == len(slipstream.tracker.reports)


def test_joined_store_contains_all_tables():
    layers = [layer("a"), layer("b")]
    store = slip.Slipstream(layers).store
    assert [table.name for table in store.tables] == ["a", "b"]
    assert store.parts == tuple(one.store for one in layers)
    with pytest.raises(ValueError, match="`table`: 'c'"):
        store.size("c")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            lambda: [layer("a", features={"x": "a"}), layer("b", features={"x": "b"})],
            r"`embeddings`: \['x'\].*unique feature names",
        ),
        (
            lambda: [layer("a"), layer("a", features={"b": "a"})],
            r"`embeddings`: \['a'\].*distinct table names",
        ),
        (lambda: [layer("a"), keras.layers.Dense(1)], r"`embeddings`"),
        (list, r"`embeddings`: \[\]"),
    ],
)
def test_incompatible_layers_raise(layers, message):
    with pytest.raises(ValueError, match=message):
        slip.Slipstream(layers())
