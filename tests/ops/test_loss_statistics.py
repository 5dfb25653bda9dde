"""Sums, progressive log loss and AUC of recorded losses match NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.loss_statistics import LossStatistics

BINS = 511


def make():
    return InputClassifier(["user"])


def cross_entropy(labels, predicted):
    return -np.log(np.where(labels > 0, predicted, 1.0 - predicted)).astype(np.float32)


def drawn(inputs, seed=0):
    """Returns labels, and predictions that are correlated with them."""
    generator = np.random.default_rng(seed)
    predicted = generator.beta(1, 3, inputs)
    labels = (generator.random(inputs) < predicted).astype(np.float32)
    return labels, predicted, generator


def exact_auc(labels, predicted, weights):
    """Returns the exact weighted AUC.

    It is the fraction of correctly ordered pairs. Ties count half. The weight of a pair is the
    product of the weights of its examples.
    """
    positive, negative = labels > 0, labels == 0
    order = np.sign(predicted[positive][:, None] - predicted[negative][None])
    pairs = weights[positive][:, None] * weights[negative][None]
    return float((pairs * (0.5 + 0.5 * order)).sum() / pairs.sum())


@pytest.mark.parametrize("is_weighted", [False, True])
def test_statistics_equal_numpy(is_weighted):
    labels, predicted, generator = drawn(3_000)
    losses = cross_entropy(labels, predicted)
    skippable = generator.random(labels.size) < 0.3
    weights = np.where(skippable, 4.0, 1.0) if is_weighted else np.ones(labels.size)
    classifier = make()
    for part in np.array_split(np.arange(labels.size), 7):
        classifier.record_losses(
            losses[part], labels[part], skippable[part],
            weights[part] if is_weighted else None,
        )  # fmt: skip
    found = classifier.take_loss_statistics()
    assert found.skippable == skippable.sum()
    residuals = np.expm1(-losses[skippable].astype(np.float64))
    assert found.skippable_squared_residuals == pytest.approx((residuals**2).sum())
    assert found.not_finite == 0
    assert found.weight == weights.sum()
    assert found.mean_loss == pytest.approx(np.average(losses, weights=weights), rel=1e-6)
    residuals = (labels - predicted) ** 2
    assert found.mean_squared_residual == pytest.approx(
        np.average(residuals, weights=weights), rel=1e-5
    )
    assert found.histogram.shape == (2, BINS)
    for label in (0, 1):
        assert found.histogram[label].sum() == pytest.approx(weights[labels == label].sum())
    # Only pairs within a bin can be counted wrongly, each by one half.
    negatives, positives = found.histogram
    error = 0.5 * (negatives * positives).sum() / (negatives.sum() * positives.sum())
    assert error < 1 / BINS * 4
    assert found.auc == pytest.approx(exact_auc(labels, predicted, weights), abs=error + 1e-9)
    assert found.auc > 0.6
    assert classifier.take_loss_statistics().mean_loss is None, "taken once"


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_is_undefined_for_single_label(label):
    classifier = make()
    classifier.record_losses([0.1, 2.0], [label, label], None)
    found = classifier.take_loss_statistics()
    assert found.auc is None and found.mean_loss == pytest.approx(1.05)


def test_auc_of_perfect_and_constant_predictions():
    classifier = make()
    classifier.record_losses([1e-3, 1e-3, 2e-3], [0, 1, 1], None)
    assert classifier.take_loss_statistics().auc == 1.0
    equal = cross_entropy(np.array([0, 1, 1, 0]), 0.3)
    classifier.record_losses(equal, [0, 1, 1, 0], None)
    assert classifier.take_loss_statistics().auc == 0.5


def test_nonfinite_losses_are_counted_and_excluded():
    classifier = make()
    classifier.record_losses([np.nan, np.inf, 0.25], [0, 1, 1], [True, True, True])
    found = classifier.take_loss_statistics()
    assert found.not_finite == 2 and found.skippable == 1
    assert found.mean_loss == 0.25


def test_graph_mode_accepts_empty_batch():
    classifier = make()

    @tf.function
    def record(losses):
        operation = classifier.record_losses(losses, tf.zeros_like(losses), None)
        assert operation is not None

    record(tf.constant([0.5, 1.5]))
    classifier.record_losses(np.empty(0, np.float32), np.empty(0, np.float32), None)
    assert classifier.take_loss_statistics().weighted_total == 2.0


@pytest.mark.parametrize(
    "arguments",
    [
        ([0.5, 0.5], [0.0], None),
        ([0.5, 0.5], [0.0, 1.0], [True]),
        ([0.5, 0.5], [0.0, 1.0], None, [1.0]),
        ([[0.5]], [[0.0]], None),
    ],
)
def test_different_lengths_raise(arguments):
    classifier = make()
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=r"shape|rank"):
        classifier.record_losses(*arguments)
    assert classifier.take_loss_statistics().weight == 0


def test_statistics_without_losses_are_empty():
    nothing = LossStatistics.from_sums(np.zeros(6), np.zeros((2, BINS)))
    assert nothing.mean_loss is nothing.mean_squared_residual is nothing.auc is None
