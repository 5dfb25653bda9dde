"""What a window's report says of its drifts, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream_tf.saturation.drift_distribution import QUANTILES, DriftDistribution

BOUNDS = np.concatenate([[0.0], 10.0 ** (np.arange(-36, 37) / 4)])
DRIFTS = st.one_of(
    st.floats(0.0, width=32),
    st.sampled_from(np.float32([0.0, 1e-42, 1e-9, 0.01, 1.0, 1e9, 1e10, np.inf, np.nan]).tolist()),
    st.sampled_from(BOUNDS.astype(np.float32).tolist()),
)


def expected(drift: np.ndarray) -> tuple[dict, tuple]:
    finite = drift[np.isfinite(drift)]
    counts, _ = np.histogram(np.minimum(finite.astype(np.float64), BOUNDS[-1]), BOUNDS)
    histogram = tuple((BOUNDS[i], BOUNDS[i + 1], counts[i]) for i in np.flatnonzero(counts))
    values = np.quantile(finite, QUANTILES) if finite.size else []
    return dict(zip(QUANTILES, values, strict=bool(finite.size))), histogram


@given(hnp.arrays(np.float32, st.integers(0, 200), elements=DRIFTS), st.integers(1, 4))
def test_it_is_what_numpy_finds_to_the_last_bit(drift, parts):
    found = DriftDistribution(np.array_split(drift, parts))
    quantiles, histogram = expected(drift)
    assert dict(found.quantiles()) == quantiles
    assert found.histogram() == histogram
    assert found.not_finite == (~np.isfinite(drift)).sum()


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.95, 1.0])
def test_the_same_of_many_drifts(zeros):
    random = np.random.default_rng(0)
    drift = (10.0 ** random.normal(-3, 2, 100_000)).astype(np.float32)
    drift[random.random(drift.size) < zeros] = 0.0
    found = DriftDistribution(np.array_split(drift, 7))
    assert (dict(found.quantiles()), found.histogram()) == expected(drift)


def test_without_a_finite_drift_there_is_nothing():
    for drift in ([], [np.empty(0, np.float32)], [np.array([np.nan, np.inf], np.float32)]):
        found = DriftDistribution(drift)
        assert found.histogram() == () and found.quantiles() == {}


def test_buckets_are_quarters_of_a_decade():
    drift = np.array([0.0, 0.011, 0.012, 0.02, 1e30, 5e-10], np.float32)
    found = DriftDistribution([drift]).histogram()
    assert [count for _, _, count in found] == [2, 2, 1, 1]
    np.testing.assert_allclose(
        [bounds[:2] for bounds in found],
        [[0.0, 1e-9], [0.01, 10**-1.75], [10**-1.75, 10**-1.5], [10**8.75, 1e9]],
    )
