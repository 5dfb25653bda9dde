"""`slipstream_tf.ops.drift` matches a NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream_tf.config import DRIFT_METRICS
from slipstream_tf.ops import _loader, drift


def reference(current, snapshot, metric):
    if metric == "linf":
        return np.max(np.abs(current - snapshot), axis=1, initial=0.0)
    current, snapshot = current.astype(np.float64), snapshot.astype(np.float64)
    return np.linalg.norm(current - snapshot, axis=1)


rows = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=40),
    elements=st.floats(-1e6, 1e6, width=32),
)


@pytest.mark.parametrize("metric", DRIFT_METRICS)
@settings(max_examples=50)
@given(snapshot=rows, seed=st.integers(0, 2**31))
def test_drift_equals_reference(metric, snapshot, seed):
    steps = np.random.default_rng(seed).normal(size=snapshot.shape).astype(np.float32)
    current = snapshot + steps
    result = drift.row_drift(current, snapshot, metric).numpy()
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, reference(current, snapshot, metric), rtol=1e-6)


@pytest.mark.parametrize("metric", DRIFT_METRICS)
def test_drift_does_not_depend_on_thread_partition(metric):
    rng = np.random.default_rng(0)
    current, snapshot = rng.normal(size=(2, 20_000, 33)).astype(np.float32)
    whole = drift.row_drift(current, snapshot, metric).numpy()
    parts = [
        drift.row_drift(current[i : i + 7_777], snapshot[i : i + 7_777], metric).numpy()
        for i in range(0, 20_000, 7_777)
    ]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("metric", DRIFT_METRICS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 7, 18])
def test_nonfinite_row_has_nonfinite_drift(metric, value, column):
    clean = np.ones((3, 19), np.float32)
    dirty = clean.copy()
    dirty[1, column] = value
    for current, snapshot in ((dirty, clean), (clean, dirty), (dirty, dirty)):
        result = drift.row_drift(current, snapshot, metric).numpy()
        assert not np.isfinite(result[1])
        assert np.isfinite(result[[0, 2]]).all()


@pytest.mark.parametrize("metric", DRIFT_METRICS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_input_returns_empty_drift(metric, shape):
    empty = np.zeros(shape, np.float32)
    np.testing.assert_array_equal(
        drift.row_drift(empty, empty, metric).numpy(), np.zeros(shape[0], np.float32)
    )


@pytest.mark.parametrize("metric", DRIFT_METRICS)
def test_function_accepts_unknown_shapes(metric):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)] * 2)
    def drift_of(current, snapshot):
        return drift.row_drift(current, snapshot, metric)

    assert drift_of.get_concrete_function().structured_outputs.shape.rank == 1
    current, snapshot = np.float32([[3, 4]]), np.float32([[0, 0]])
    np.testing.assert_allclose(
        drift_of(current, snapshot), reference(current, snapshot, metric), rtol=1e-6
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2,2\]; expected \[1,2\]"):
        drift_of(current, np.zeros((2, 2), np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="current has shape"):
        drift_of(np.zeros(3, np.float32), np.zeros(3, np.float32))


def test_static_shape_is_inferred():
    @tf.function
    def drift_of(current, snapshot):
        result = drift.row_drift(current, snapshot)
        assert result.shape.as_list() == [4]
        return result

    drift_of(tf.zeros([4, 2]), tf.ones([4, 2]))


def test_drift_has_no_gradient():
    current = tf.Variable([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(drift.row_drift(current, [[0.0, 0.0]]))
    assert tape.gradient(total, current) is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(metric="l1"), ValueError, r"Invalid `metric`: 'l1'.*'linf', 'l2'"),
        (dict(snapshot=np.zeros((2, 4), np.float32)), ValueError, r"\(2, 4\).*\(2, 3\)"),
        (dict(snapshot=np.zeros((1, 3), np.float32)), ValueError, r"\(1, 3\).*\(2, 3\)"),
        (dict(snapshot=np.zeros(3, np.float32)), ValueError, r"Invalid `snapshot`: shape \(3,\)"),
        (dict(current=np.zeros((2, 3))), TypeError, "Invalid `current`: dtype float64"),
    ],
)
def test_invalid_input_raises(arguments, error, message):
    good = dict(current=np.zeros((2, 3), np.float32), snapshot=np.zeros((2, 3), np.float32))
    with pytest.raises(error, match=message):
        drift.row_drift(**{**good, **arguments})


def test_op_rejects_invalid_input():
    """Input that bypasses the Python wrapper is rejected by the kernel."""
    op = _loader.library().slipstream_row_drift
    zeros = tf.zeros([2, 3])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2,4\]; expected \[2,3\]"):
        op(current=zeros, snapshot=tf.zeros([2, 4]))
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="l1"):
        op(current=zeros, snapshot=zeros, metric="l1")


def test_every_argument_is_documented():
    doc = _loader.library().slipstream_row_drift.__doc__
    for argument in ("current", "snapshot", "metric"):
        assert f"{argument}: " in doc
