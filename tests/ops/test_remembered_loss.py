"""Skipping by remembered loss: ops.classifier against a dictionary, over random visits."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.hashing import hash_keys
from slipstream_tf.ops.classifier import ClassifierCounts, InputClassifier
from slipstream_tf.ops.features import FeatureSpec

INF = np.float32(np.inf)
SPECS = [FeatureSpec("user", "user"), FeatureSpec("item", "item")]
MEMORY = 1 << 16


class Reference:
    """The definition, input by input: id -> [loss, window, skips, has returned]."""

    def __init__(self, alpha, max_skips, weighs):
        self.alpha, self.max_skips, self.weighs = Fraction(alpha), max_skips, weighs
        self.memory, self.since = {}, {}

    def classify(self, ids, rows, threshold):
        results = []
        for input_id, row in zip(ids, rows, strict=True):
            entry = self.memory.get(input_id)
            score, skips = INF, 0
            if entry is not None:
                skips = entry[2]
                saturated = sorted(self.since.get(lookup, math.inf) for lookup in enumerate(row))
                if saturated[math.ceil(self.alpha * len(row)) - 1] <= entry[1]:
                    score = entry[0]
            skippable = bool(score < threshold)
            returns = False
            if skippable and self.max_skips:
                limit = self.max_skips
                if not entry[3]:
                    limit = int(hash_keys(np.array([input_id]))[0]) % (self.max_skips + 1)
                returns = skips >= limit
            weight = 0.0 if skippable and not returns else 1.0 + skips * self.weighs
            if returns:
                entry[3] = 1
            if weight == 0.0:
                entry[2] = min(skips + 1, 127)
            results.append((skippable, score, weight))
        return results

    def record(self, ids, losses, window):
        for input_id, loss in zip(ids, losses, strict=True):
            if not np.isfinite(loss):
                self.memory.pop(input_id, None)
                continue
            entry = self.memory.setdefault(input_id, [0, 0, 0, 0])
            entry[:3] = loss, window, 0


def assert_same_memory(classifier, reference):
    exported = classifier.export_memory()
    expected = sorted(reference.memory.items())
    assert exported["ids"].tolist() == [key for key, _ in expected]
    assert exported["losses"].tolist() == [entry[0] for _, entry in expected]
    assert exported["visits"].tolist() == [entry[1:] for _, entry in expected]


@pytest.mark.parametrize(
    "alpha, max_skips, weighs",
    [("1", 3, True), ("1", 0, True), ("1/2", 1, False), ("1", 127, True)],
)
def test_random_visits_equal_the_reference(alpha, max_skips, weighs):
    generator = np.random.default_rng(max_skips)
    classifier = InputClassifier(
        ["user", "item"], float(Fraction(alpha)), loss_memory_bytes=MEMORY, max_skips=max_skips,
        weigh_visits=weighs,
    )  # fmt: skip
    reference = Reference(alpha, max_skips, weighs)
    rows_of = generator.integers(0, 5, (60, 2))
    outcomes = set()
    for window in range(40):
        saturated = [(t, k) for t in range(2) for k in range(5) if generator.random() < 0.85]
        reference.since = {
            lookup: min(reference.since.get(lookup, window), window) for lookup in saturated
        }
        tables, keys = np.array(saturated).reshape(-1, 2).T
        classifier.set_saturated(tables, keys, [reference.since[lookup] for lookup in saturated])
        threshold = float(np.float32(generator.random()))
        classifier.configure("remembered_loss", threshold, window=window)
        counts = np.zeros(5, int)
        for _ in range(3):
            ids = generator.integers(0, 60, 20)  # the same input may come twice in a batch
            found = classifier.classify(rows_of[ids], SPECS, ids=ids)
            expected = reference.classify(ids.tolist(), rows_of[ids].tolist(), threshold)
            for part, values in zip(found, zip(*expected, strict=True), strict=True):
                np.testing.assert_array_equal(part, values)
            skippable, score, weight = (part.numpy() for part in found)
            kept = skippable & (weight > 0)
            counts += [20, (weight == 0).sum(), np.isfinite(score).sum(), skippable.sum(),
                       kept.sum()]  # fmt: skip
            outcomes |= set(zip(skippable.tolist(), weight.tolist(), strict=True))
            trained = weight > 0
            losses = generator.random(trained.sum()).astype(np.float32)
            losses[generator.random(losses.size) < 0.05] = np.nan
            classifier.record_losses(ids[trained], losses, losses < 0.5, skippable[trained])
            reference.record(ids[trained].tolist(), losses.tolist(), window)
        assert classifier.end_window() == ClassifierCounts(*counts.tolist())
    assert_same_memory(classifier, reference)
    assert (True, 0.0) in outcomes and (False, 1.0) in outcomes
    if max_skips == 3:
        assert {(True, 1.0), (True, 3.0), (True, 4.0)} <= outcomes, "returns after 0 to 3 skips"
    if not weighs:
        assert {weight for _, weight in outcomes} == {0.0, 1.0}


def with_remembered(losses, max_skips=0, **settings):
    """A classifier that remembers losses for inputs 0, 1, ... of user 1, who is saturated."""
    classifier = InputClassifier(
        ["user", "item"], loss_memory_bytes=MEMORY, max_skips=max_skips, **settings
    )
    classifier.set_saturated([0], [1], [0])
    classifier.record_losses(np.arange(len(losses)), losses, np.zeros(len(losses)), None)
    classifier.configure("remembered_loss", 0.5, window=1)
    return classifier


def users(n):
    return {"user": np.ones(n, np.int64)}


def test_a_key_that_was_not_saturated_at_the_visit_makes_its_inputs_hot_again():
    classifier = with_remembered([0.1])
    for since, is_skippable in ((0, True), (1, False)):
        classifier.set_saturated([0], [1], [since])
        found = classifier.classify(users(1), SPECS[:1], ids=[0])
        assert found.skippable.numpy().tolist() == [is_skippable]
    np.testing.assert_array_equal(found.score, [INF])


def test_unobserved_inputs_count_no_skip():
    classifier = with_remembered([0.1])
    classifier.classify(users(1), SPECS[:1], ids=[0], observe=False)
    assert classifier.export_memory()["visits"].tolist() == [[0, 0, 0]]
    assert classifier.end_window() == ClassifierCounts(0, 0, 0)


def test_reservoir_losses_are_those_that_sampled_inputs_had():
    classifier = with_remembered([0.25, 0.75])
    classifier.classify(users(3), SPECS[:1], ids=[0, 1, 2])
    assert sorted(classifier.reservoir_losses()) == [0.25, 0.75]
    classifier.end_window()
    assert classifier.reservoir_losses().shape == (0,)


def test_thinning_and_shadow_of_remembered_losses():
    classifier = with_remembered(np.full(3_000, 0.1), weigh_visits=True)
    ids = np.arange(3_000)
    classifier.configure("remembered_loss", 0.5, keep_rate=0.5, window=1)
    weight = classifier.classify(users(3_000), SPECS[:1], ids=ids).weight.numpy()
    assert set(weight) == {0.0, 2.0} and abs(weight.mean() - 1.0) < 5 / math.sqrt(3_000)
    classifier.configure("remembered_loss", 0.5, shadow=True, window=1)
    skippable, _, weight = classifier.classify(users(3_000), SPECS[:1], ids=ids)
    assert skippable.numpy().all() and (weight.numpy() == 1.0).all()


def test_export_and_import_make_the_same_memory():
    first = with_remembered(np.linspace(0, 1, 50), max_skips=3, weigh_visits=True)
    for _ in range(3):
        first.classify(users(50), SPECS[:1], ids=np.arange(50))
    contents = first.export_memory()
    assert contents["visits"][:, 1:].max(axis=0).tolist() == [3, 1]
    second = with_remembered([], max_skips=3, weigh_visits=True)
    second.import_memory(contents)
    for name, values in second.export_memory().items():
        np.testing.assert_array_equal(values, contents[name])
    for _ in range(3):
        outcomes = [c.classify(users(50), SPECS[:1], ids=np.arange(50)) for c in (first, second)]
        for one, other in zip(*outcomes, strict=True):
            np.testing.assert_array_equal(one, other)
    second.import_memory(with_remembered([]).export_memory())
    assert second.export_memory()["ids"].shape == (0,)


def test_a_full_memory_keeps_to_a_sample_of_the_inputs():
    classifier = InputClassifier(["user", "item"], loss_memory_bytes=64 * 16)
    samples = []
    for window, order in enumerate((1, -1, 1)):
        classifier.configure("none", window=window)
        ids = np.arange(500)[::order]
        classifier.record_losses(ids, np.ones(500), np.ones(500), None)
        samples.append(classifier.export_memory()["ids"].tolist())
    assert 30 <= len(samples[0]) <= 51
    assert samples[1] == samples[0] == samples[2], "the same in every epoch, whatever the order"


def remembered_in_shadow(shadow):
    """Passes over inputs of which all but the first are easy; returns how many would be skipped."""
    classifier = with_remembered([5.0] + [0.1] * 59, max_skips=2)
    share = []
    for window in range(1, 13):
        classifier.configure("remembered_loss", threshold=1.0, shadow=shadow, window=window)
        skippable, _, weight = classifier.classify(users(60), SPECS[:1], ids=np.arange(60))
        kept = weight.numpy() > 0
        losses = np.where(np.arange(60) == 0, 5.0, 0.1)
        classifier.record_losses(
            np.arange(60)[kept], losses[kept], np.ones(kept.sum()), skippable.numpy()[kept]
        )
        counts = classifier.end_window()
        share.append(counts.examples_skippable - counts.examples_kept)
    return share


def test_shadow_mode_foresees_returns():
    assert remembered_in_shadow(True) == remembered_in_shadow(False)


def test_without_a_memory_nothing_is_remembered():
    classifier = InputClassifier(["user", "item"])
    classifier.record_losses([1, 2], [0.5, 0.5], [0, 1], None)
    assert classifier.export_memory()["ids"].shape == (0,)
    assert classifier.take_loss_statistics().others.count == 2


def test_ids_that_are_missing_or_too_few():
    classifier = with_remembered([0.1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="no ids"):
        classifier.classify(users(2), SPECS[:1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids"):
        classifier.classify(users(2), SPECS[:1], ids=[0])
    assert classifier.end_window().examples_seen == 0
    empty = classifier.classify(users(0), SPECS[:1], ids=np.empty(0, np.int64))
    assert empty.weight.shape == (0,)


@pytest.mark.parametrize(
    "contents",
    [
        {"ids": [1, 2], "losses": [0.5], "visits": [[0, 0, 0]]},
        {"ids": [1], "losses": [0.5], "visits": [[0, 0]]},
        {"ids": [1], "losses": [0.5], "visits": [[-1, 0, 0]]},
        {"ids": [1], "losses": [0.5], "visits": [[0, 128, 0]]},
    ],
)
def test_a_bad_import_changes_nothing(contents):
    classifier = with_remembered([0.1])
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=r"visits|shape"):
        classifier.import_memory(contents)
    assert classifier.export_memory()["ids"].tolist() == [0]


def test_a_memory_too_small_for_anything():
    with pytest.raises(tf.errors.InvalidArgumentError, match="loss_memory_bytes is 10"):
        InputClassifier(["user"], loss_memory_bytes=10)
