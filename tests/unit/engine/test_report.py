"""What a window's report says of its drifts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream_tf.engine.report import drift_histogram


def histogram_of(drift):
    return drift_histogram(np.sort(drift[np.isfinite(drift)]))


def test_no_finite_drift_has_no_bucket():
    assert histogram_of(np.empty(0, np.float32)) == ()
    assert histogram_of(np.array([np.nan, np.inf], np.float32)) == ()


def test_buckets_are_quarters_of_a_decade():
    found = histogram_of(np.array([0.0, 0.011, 0.012, 0.02, 1e30, 5e-10], np.float32))
    assert [count for _, _, count in found] == [2, 2, 1, 1]
    np.testing.assert_allclose(
        [bounds[:2] for bounds in found],
        [[0.0, 1e-9], [0.01, 10**-1.75], [10**-1.75, 10**-1.5], [10**8.75, 1e9]],
    )


@given(hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(0, 1e8, width=32)))
def test_every_finite_drift_is_in_its_bucket(drift):
    drift, given_drift = drift.astype(np.float64), drift
    found = histogram_of(given_drift)
    assert sum(count for _, _, count in found) == drift.size
    for lower, upper, count in found:
        assert count == ((drift >= lower) & (drift < upper)).sum() > 0
    assert list(found) == sorted(found)


def test_many_drifts_of_all_sizes_are_in_their_buckets():
    rng = np.random.default_rng(0)
    drift = (10.0 ** rng.uniform(-12, 12, 150_000)).astype(np.float32)
    bounds = (10.0 ** (np.arange(-36, 37) / 4)).astype(np.float32)
    # About bounds, where the least digits decide.
    beside = [np.nextafter(bounds, np.float32(to)) for to in (0.0, np.inf)]
    drift = np.concatenate([drift, bounds, *beside, np.zeros(9, np.float32), [np.nan, np.inf]])
    found = histogram_of(drift.astype(np.float32))
    exact = np.concatenate([[0.0], 10.0 ** (np.arange(-36, 37) / 4)])
    values = np.minimum(drift[np.isfinite(drift)].astype(np.float64), 1e9)
    counts, _ = np.histogram(values, exact)
    assert found == tuple(zip(exact[:-1], exact[1:], counts, strict=True))
