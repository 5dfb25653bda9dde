"""Tests of `policies.threshold`: the exact quantile and its edge cases."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream_tf.policies.threshold import ThresholdResult, find_threshold

FLOAT32_MAX = float(np.finfo(np.float32).max)

any_scores = hnp.arrays(
    np.float32,
    st.integers(0, 60),
    elements=st.one_of(
        st.floats(0, FLOAT32_MAX, width=32),
        # Includes ties and keys outside the hot set.
        st.sampled_from([0.0, 1.0, 2.0, math.inf, math.nan]),
    ),
)
percents = st.integers(0, 100)


def below(scores, result):
    """Returns the number of scores below the threshold T."""
    return int((np.asarray(scores, np.float32) < np.float32(result.threshold)).sum())


@given(scores=any_scores, percent=percents)
def test_threshold_equals_order_statistic(scores, percent):
    result = find_threshold(scores, percent / 100)
    hot = sorted(float(s) for s in scores if math.isfinite(s))
    k = math.floor(Fraction(percent, 100) * len(hot))
    if k == 0:
        expected = 0.0
    elif k == len(hot):
        expected = float(np.nextafter(np.float32(hot[-1]), np.float32(np.inf)))
    else:
        expected = hot[k]
    assert result == ThresholdResult(expected)


@given(scores=any_scores, percent=percents, cap=st.none() | st.floats(0, 10))
def test_threshold_never_skips_more_than_target(scores, percent, cap):
    result = find_threshold(scores, percent / 100, cap)
    hot = int(np.isfinite(scores).sum())
    assert below(scores, result) <= Fraction(percent, 100) * hot


@given(scores=any_scores, first=percents, second=percents)
def test_threshold_grows_with_target(scores, first, second):
    low, high = sorted((first, second))
    assert (
        find_threshold(scores, low / 100).threshold <= find_threshold(scores, high / 100).threshold
    )


@given(scores=any_scores, percent=percents, seed=st.integers(0, 99))
def test_threshold_does_not_depend_on_order(scores, percent, seed):
    shuffled = np.random.default_rng(seed).permutation(scores)
    assert find_threshold(scores, percent / 100) == find_threshold(shuffled, percent / 100)


@given(scores=any_scores, percent=percents, cap=st.floats(0, 1e300))
def test_cap_bounds_threshold_and_is_reported(scores, percent, cap):
    free, capped = find_threshold(scores, percent / 100), find_threshold(scores, percent / 100, cap)
    assert capped.threshold <= max(cap, 0.0)
    assert capped.is_capped == (capped.threshold < free.threshold)
    if free.threshold <= cap:
        assert capped.threshold == free.threshold


def test_whole_fraction_is_skipped_without_ties():
    scores = np.random.default_rng(0).permutation(1000).astype(np.float32)
    for percent in range(101):  # Includes fractions whose product with 1000 is not exact.
        assert below(scores, find_threshold(scores, percent / 100)) == percent * 10


def test_products_just_below_integer_are_rounded_to_it():
    assert 0.29 * 100 < 29
    assert below(np.arange(100), find_threshold(np.arange(100), 0.29)) == 29
    assert below(np.arange(3), find_threshold(np.arange(3), 2 / 3)) == 2


def test_ties_at_threshold_are_not_skipped():
    scores = [1.0, 2.0, 2.0, 2.0, 3.0]
    result = find_threshold(scores, 0.6)
    assert (result.threshold, below(scores, result)) == (2.0, 1)
    scores = [0.0] * 10
    result = find_threshold(scores, 0.5)
    assert (result.threshold, below(scores, result)) == (0.0, 0)
    assert below(scores, find_threshold(scores, 1.0)) == 10


@pytest.mark.parametrize("scores", [[], [math.inf], [math.nan, math.inf]])
def test_nothing_is_skipped_without_hot_examples(scores):
    assert find_threshold(scores, 1.0) == ThresholdResult(0.0)
