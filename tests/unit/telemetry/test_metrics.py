"""Tests of exact AUC, log loss and calibration against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf.telemetry.metrics import ClickMetrics, click_metrics, exact_auc

# Few distinct scores, so that most pairs are tied.
TIED = st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3)), min_size=1, max_size=40)
FREE = st.lists(
    st.tuples(st.integers(0, 1), st.floats(-30, 30, allow_subnormal=True)), min_size=1, max_size=40
)


def auc_of_all_pairs(labels: np.ndarray, scores: np.ndarray) -> float:
    clicks, others = scores[labels == 1], scores[labels == 0]
    if not clicks.size or not others.size:
        return math.nan
    difference = clicks[:, None] - others[None, :]
    return float(np.mean(np.where(difference > 0, 1.0, np.where(difference == 0, 0.5, 0.0))))


@given(st.one_of(TIED, FREE))
def test_auc_equals_fraction_of_ordered_pairs(pairs: list[tuple[int, float]]) -> None:
    labels, scores = (np.array(column) for column in zip(*pairs, strict=True))
    expected = auc_of_all_pairs(labels, scores.astype(float))
    assert exact_auc(labels, scores) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@given(TIED, st.randoms())
def test_auc_does_not_depend_on_order(pairs: list, random: object) -> None:
    before = exact_auc(*zip(*pairs, strict=True))
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert exact_auc(*zip(*shuffled, strict=True)) == pytest.approx(before, abs=0, nan_ok=True)


@given(TIED)
def test_auc_of_reversed_scores_is_complement(pairs: list[tuple[int, int]]) -> None:
    labels, scores = (np.array(column) for column in zip(*pairs, strict=True))
    complement = 1.0 - exact_auc(labels, -scores)
    assert exact_auc(labels, scores) == pytest.approx(complement, abs=1e-12, nan_ok=True)


def test_auc_equals_hand_computed_values() -> None:
    assert exact_auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == 0.75
    assert exact_auc([1, 0], [0.0, -0.0]) == 0.5
    assert math.isnan(exact_auc([1, 1], [0.1, 0.2]))


@given(FREE)
def test_log_loss_and_calibration_equal_definition(pairs: list[tuple[int, float]]) -> None:
    labels, logits = (np.array(column, float) for column in zip(*pairs, strict=True))
    metrics = click_metrics(labels, logits)
    probability = 1.0 / (1.0 + np.exp(-logits))
    loss = -np.mean(labels * np.log(probability) + (1 - labels) * np.log1p(-probability))
    assert metrics.log_loss == pytest.approx(loss, rel=1e-3, abs=1e-9)
    assert metrics.examples == labels.size and metrics.clicks == labels.sum()
    if metrics.clicks:
        assert metrics.calibration == pytest.approx(probability.mean() / labels.mean())
    else:
        assert math.isnan(metrics.calibration)
        assert metrics.to_dict()["calibration"] is None


def test_extreme_logits_do_not_overflow() -> None:
    metrics = click_metrics([1, 0], [1000.0, 1000.0])
    assert metrics.log_loss == pytest.approx(500.0)
    assert metrics.calibration == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([0, 1], [0.5], r"`labels`: \(2,\).*n >= 1, equal to the shape \(1,\) of `scores`"),
        ([], [], "n >= 1"),
        ([0, 2], [0.1, 0.2], "`labels`: 2 for example 1 of.*0 or 1"),
        ([0, math.nan], [0.1, 0.2], "`labels`: nan"),
        ([0, 1], [0.1, math.nan], "`scores`: nan.*example 1.*finite"),
        ([0, 1], [math.inf, 0.0], "`scores`: inf.*example 0"),
    ],
)
def test_invalid_input_error_names_value_and_position(
    labels: list, scores: list, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        exact_auc(labels, scores)


def test_auc_error_is_spread_of_random_orders() -> None:
    random, labels = np.random.default_rng(0), np.arange(60) % 3 == 0
    aucs = [exact_auc(labels, random.random(60)) for _ in range(2000)]
    metrics = click_metrics(labels, np.zeros(60))
    assert np.std(aucs) == pytest.approx(metrics.auc_error, rel=0.05)
    constant = click_metrics(labels, np.full(60, math.log(0.5)))
    assert metrics.base_log_loss == pytest.approx(constant.log_loss)


@pytest.mark.parametrize(
    ("auc", "log_loss", "expected"),
    [
        (0.6, 0.60, ""),
        (0.52, 0.60, ""),
        (0.505, 0.60, "test AUC of 0.5050 is at most one standard error (0.0097) above 0.5"),
        (0.40, 0.60, "test AUC of 0.4000"),
        (0.6, 0.62, ""),
        (0.6, 0.64, "test log loss of 0.6400 is above 0.6365, the log loss of predicting the"),
    ],
)
def test_no_learning_reason_compares_with_constant(
    auc: float, log_loss: float, expected: str
) -> None:
    found = ClickMetrics(auc, log_loss, 1.0, 4000, 1333).no_learning_reason()
    assert expected in found and bool(found) == bool(expected)


def test_no_learning_reason_names_part_and_single_label() -> None:
    assert "validation AUC" in ClickMetrics(0.4, 0.7, 1.0, 90, 30).no_learning_reason("validation")
    for label in (0, 1):
        words = click_metrics([label] * 3, [0.0, 0.1, 0.2]).no_learning_reason()
        assert words.endswith(f"because all 3 labels of the test part are {label}.")
