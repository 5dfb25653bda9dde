"""Tests of `PredictedLoss` in `model.fit`: pilots, corrections, dry run, checkpoints, misuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.sampling.subsampling import click_of

KEYS, BATCH = 50, 256


def clicks(examples, seed=0, rate=0.05):
    """Returns examples with two keys and a click label.

    Each pair of keys has its click rate.
    """
    random = np.random.default_rng(seed)
    law = np.random.default_rng(99).normal(0.0, 1.5, (2, KEYS))
    keys = random.integers(0, KEYS, (examples, 2))
    log_odds = np.log(rate / (1 - rate)) + law[0, keys[:, 0]] + law[1, keys[:, 1]] - 1.0
    label = random.random(examples) < 1.0 / (1.0 + np.exp(-log_odds))
    return keys.astype(np.int64), label.astype(np.float32)


def dataset(keys, label, weight=None, batch=BATCH):
    features = {"first": keys[:, 0], "second": keys[:, 1]}
    parts = (features, label) if weight is None else (features, label, weight)
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch)


def build(policies, kind=slip.keras.Model, dry_run=False, logits=False, **engine):
    keras.utils.set_random_seed(1)
    embeddings = slip.keras.EmbeddingCollection(
        [slip.Table("first", 4), slip.Table("second", 4)], slip.optimizers.Adagrad(0.1)
    )
    inputs = {
        name: keras.Input((), dtype="int64", name=name, batch_size=None)
        for name in ("first", "second")
    }
    rows = embeddings(inputs)
    joined = keras.layers.Concatenate()([rows["first"], rows["second"]])
    activation = None if logits else "sigmoid"
    model = kind(inputs, keras.layers.Dense(1, activation)(joined))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=logits))
    engine = {"window": slip.Window(5, warmup=20, planned_steps=400), **engine}
    slipstream = slip.Slipstream(embeddings, policies, dry_run=dry_run, **engine)
    return model, slipstream


def fit(model, slipstream, data, **settings):
    return model.fit(
        slipstream.apply(data), verbose=0, callbacks=[slipstream.callback()], **settings
    )


def predictions(model, keys):
    features = {"first": keys[:, 0], "second": keys[:, 1]}
    return model.predict(features, batch_size=4096, verbose=0)[:, 0]


def skip(**settings):
    fraction = settings.pop("fraction", 0.7)
    return slip.SkipExamples(slip.PredictedLoss(**settings), fraction=fraction)


@pytest.mark.parametrize(
    ("pilot", "correction", "logits"),
    [
        *((pilot, "weight", False) for pilot in ("fm", "linear", "label", "model")),
        *(("fm", "offset", logits) for logits in (False, True)),
        *(("model", correction, True) for correction in ("weight", "offset")),
    ],
)
def test_subsampling_keeps_fraction_and_calibration(pilot, correction, logits):
    keys, label = clicks(60_000)
    model, slipstream = build(skip(pilot=pilot, correction=correction), logits=logits)
    fit(model, slipstream, dataset(keys, label))
    active = [report for report in slipstream.tracker.reports if not report.is_warming_up]
    skipped = sum(report.examples_skipped for report in active)
    assert skipped / sum(report.examples_seen for report in active) == pytest.approx(0.7, abs=0.06)
    keys, label = clicks(40_000, seed=1)
    predicted = predictions(model, keys)
    predicted = 1.0 / (1.0 + np.exp(-predicted)) if logits else predicted
    # Most dropped examples are negatives. Without correction the predictions would double.
    assert predicted.mean() / label.mean() == pytest.approx(1.0, abs=0.12)
    assert keras.metrics.AUC()(label, predicted) > 0.8


def test_calibration_over_seeds_is_within_2_percent_of_plain_training():
    ratios = {"weight": [], "offset": []}
    test_keys, _ = clicks(20_000, seed=1)
    for seed in range(2, 5):
        keys, label = clicks(40_000, seed=seed)
        means = {}
        for correction in (None, *ratios):
            policies = [] if correction is None else skip(correction=correction)
            model, slipstream = build(policies)
            # The rate decays toward 0, so that noise of the last steps affects neither model.
            decay = keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.02 * 0.1**epoch)
            data = slipstream.apply(dataset(keys, label, batch=512))
            model.fit(data, epochs=2, verbose=0, callbacks=[decay, slipstream.callback()])
            means[correction] = predictions(model, test_keys).mean()
        for correction, found in ratios.items():
            found.append(means[correction] / means[None])
    for correction, found in ratios.items():
        assert np.mean(found) == pytest.approx(1.0, abs=0.02), (correction, found)


def test_weights_of_window_sum_to_number_of_examples():
    keys, label = clicks(20_000)
    _, slipstream = build(skip())
    slipstream.tracker.classifier.configure("predicted_loss", 0.2, keep_rate=0.05)
    total = positives = kept = 0
    for _, y, weight in slipstream.apply(dataset(keys, label)):
        total += float(tf.reduce_sum(weight))
        positives += float(tf.reduce_sum(weight * y))
        kept += len(y)
    assert kept < 10_000
    assert total / 20_000 == pytest.approx(1.0, abs=0.05)
    assert positives / label.sum() == pytest.approx(1.0, abs=0.03)


def test_partial_last_batch_has_equal_weight_per_example():
    keys, label = clicks(BATCH + 1)
    _, slipstream = build(skip())
    (_, _, first), (_, _, last) = slipstream.apply(dataset(keys, label))
    np.testing.assert_array_equal(first, np.ones(BATCH, np.float32))
    np.testing.assert_array_equal(last, np.float32([1 / BATCH]))


def test_batches_are_full_and_in_order():
    keys, label = clicks(10_000)
    keys[:, 0] = np.arange(10_000)
    _, slipstream = build(skip())
    slipstream.tracker.classifier.configure("predicted_loss", 0.2, keep_rate=0.05)
    batches = [x["first"].numpy() for x, _, _ in slipstream.apply(dataset(keys, label))]
    assert {len(batch) for batch in batches[:-1]} == {BATCH}
    assert np.all(np.diff(np.concatenate(batches)) > 0)


def test_user_sample_weights_are_multiplied_and_train_pilot():
    keys, label = clicks(2_000)
    weight = np.full(2_000, 3.0, np.float32)
    learnt = []
    for own in (weight, None):
        _, slipstream = build(skip(pilot="linear"))
        slipstream.tracker.classifier.configure("predicted_loss", 0.5, keep_rate=0.05)
        weights = [w.numpy() for _, _, w in slipstream.apply(dataset(keys, label, own))]
        full = [part for part in weights if len(part) == BATCH]
        assert np.concatenate(full).min() >= (1.0 if own is None else 3.0)
        learnt.append(slipstream.tracker.classifier.export_pilot()["numbers"])
    assert learnt[0].shape != learnt[1].shape or np.abs(learnt[0] - learnt[1]).max() > 0.01
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"sample_weights\[0\] is -3"):
        list(slipstream.apply(dataset(keys, label, -weight)))


@pytest.mark.parametrize("correction", ["weight", "offset"])
def test_model_pilot_handles_batches_with_all_examples_dropped(correction):
    keys, label = clicks(6)
    _, slipstream = build(skip(pilot="model", correction=correction))
    slipstream.tracker.classifier.configure("predicted_loss", 1.0, keep_rate=1e-6)
    features = {"first": keys[:, 0], "second": keys[:, 1]}
    _, y, weight = slipstream.subsample((features, 0.0 * label), tf.zeros(6))
    assert y.shape == (1,) and float(weight[0]) == 0.0
    nothing = {name: value[:0] for name, value in features.items()}
    _, y, weight = slipstream.subsample((nothing, label[:0]), tf.zeros(0))
    assert y.shape == weight.shape == (0,)


def test_fit_without_callback_drops_nothing():
    keys, label = clicks(8_000)
    model, slipstream = build(skip(pilot="model"))
    fit(model, slipstream, dataset(keys, label))
    seen = slipstream.tracker.classifier.counts().examples_seen
    model.fit(dataset(keys, label), verbose=0)
    assert slipstream.tracker.classifier.counts().examples_seen == seen


def test_pilot_of_other_size_is_not_restored(tmp_path):
    keys, label = clicks(4_000)
    model, slipstream = build(skip(memory="1MiB"))
    fit(model, slipstream, dataset(keys, label))
    path = tf.train.Checkpoint(slipstream=slipstream).save(str(tmp_path / "checkpoint"))
    for settings, size in (({"memory": "1MiB"}, 1), ({"memory": "2MiB"}, 0)):
        _, other = build(skip(**settings))
        tf.train.Checkpoint(slipstream=other).restore(path)
        assert (other.tracker.classifier.export_pilot()["buckets"].size > 0) == bool(size)


def test_custom_train_step_error_names_subsample():
    class Own(slip.keras.Model):
        def train_step(self, data):
            x, y, *_ = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    keys, label = clicks(4_000)
    model, slipstream = build(skip(pilot="model"), kind=Own)
    with pytest.warns(RuntimeWarning, match="does not call `slipstream.subsample"):
        fit(model, slipstream, dataset(keys, label))


def test_smoothed_labels_raise_with_offset_correction():
    keys, label = clicks(2_000)
    model, slipstream = build(skip(correction="offset"))
    smoothed = keras.losses.BinaryCrossentropy(label_smoothing=0.1)
    model.compile("adam", smoothed)
    with pytest.raises(ValueError, match=r"`label_smoothing`: 0.1"):
        fit(model, slipstream, dataset(keys, label))


def test_labels_between_0_and_1_have_weights_but_no_offset():
    keys, label = clicks(1_000)
    label = 0.5 * label
    _, slipstream = build(skip())
    assert sum(len(y) for _, y, _ in slipstream.apply(dataset(keys, label))) == 1_000
    _, slipstream = build(skip(correction="offset"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="neither 0 nor 1"):
        list(slipstream.apply(dataset(keys, label)))
    _, slipstream = build(skip())
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"labels\[0\] is 2"):
        list(slipstream.apply(dataset(keys, np.full(1_000, 2.0, np.float32))))


def test_largest_of_multiple_labels_is_click():
    one = tf.constant([0, 1, 0])
    both = {"a": one[:, None], "b": tf.constant([[0.0, 0.0], [0.0, 0.5], [0.25, 0.0]])}
    np.testing.assert_array_equal(click_of(one), [0.0, 1.0, 0.0])
    np.testing.assert_array_equal(click_of(both), [0.0, 1.0, 0.25])


@pytest.mark.parametrize("pilot", ["fm", "model"])
def test_dry_run_equals_plain_training(pilot):
    keys, label = clicks(20_000)
    plain, watching = build(())
    fit(plain, watching, dataset(keys, label))
    model, slipstream = build(skip(pilot=pilot), dry_run=True)
    fit(model, slipstream, dataset(keys, label))
    np.testing.assert_array_equal(predictions(plain, keys), predictions(model, keys))
    active = [report for report in slipstream.tracker.reports if not report.is_warming_up]
    saved = sum(report.examples_skippable - report.examples_kept for report in active)
    assert saved / sum(r.examples_seen for r in active) == pytest.approx(0.7, abs=0.06)
    assert "examples" in str(slipstream.report())


def test_checkpoint_restores_pilot(tmp_path):
    keys, label = clicks(30_000)
    model, slipstream = build(skip())
    fit(model, slipstream, dataset(keys[:15_360], label[:15_360]))
    checkpoint = tf.train.Checkpoint(model=model, slipstream=slipstream)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    again, other = build(skip())
    again.build({"first": (None,), "second": (None,)})
    tf.train.Checkpoint(model=again, slipstream=other).restore(path)
    rest = dataset(keys[15_360:], label[15_360:])
    for one, engine in ((model, slipstream), (again, other)):
        fit(one, engine, rest)
    np.testing.assert_array_equal(predictions(model, keys), predictions(again, keys))
    pilots = [engine.tracker.classifier.export_pilot() for engine in (slipstream, other)]
    for name, values in pilots[0].items():
        np.testing.assert_array_equal(values, pilots[1][name])


@pytest.mark.parametrize("settings", [{"correction": "offset"}, {"pilot": "model"}])
def test_settings_that_require_slip_model_raise_with_keras_model(settings):
    keys, label = clicks(1_000)
    model, slipstream = build(skip(**settings), kind=keras.Model)
    with pytest.raises(ValueError, match=r"which is not a slip\.keras\.Model"):
        fit(model, slipstream, dataset(keys, label))


def test_weight_correction_works_with_plain_keras_model():
    keys, label = clicks(20_000)
    model, slipstream = build(skip(), kind=keras.Model)
    fit(model, slipstream, dataset(keys, label))
    assert slipstream.report().examples_skipped > 5_000


def test_data_without_labels_raises():
    keys, label = clicks(100)
    _, slipstream = build(skip())
    with pytest.raises(ValueError, match="the pilot learns from labels"):
        slipstream.apply(dataset(keys, label).map(lambda x, y: x))


def test_ragged_and_padded_features_are_subsampled():
    keys, label = clicks(4_000)
    embeddings = slip.keras.EmbeddingCollection([slip.Table("first", 4)])
    slipstream = slip.Slipstream(embeddings, skip())
    bags = tf.RaggedTensor.from_row_lengths(keys.reshape(-1), np.full(4_000, 2))
    data = tf.data.Dataset.from_tensor_slices(({"first": bags}, label)).batch(BATCH)
    slipstream.tracker.classifier.configure("predicted_loss", 0.3, keep_rate=0.05)
    kept = [x["first"] for x, _, _ in slipstream.apply(data)]
    assert 0 < sum(int(part.nrows()) for part in kept) < 4_000
    padded = np.where(np.arange(4_000)[:, None] % 2, keys, [[-1, -1]])
    data = tf.data.Dataset.from_tensor_slices(({"first": padded}, label)).batch(BATCH)
    assert 0 < sum(len(y) for _, y, _ in slipstream.apply(data)) < 4_000
