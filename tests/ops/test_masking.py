"""slipstream_tf.ops.mask against a NumPy reference."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops import _loader, mask

needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU") or not _loader.build_info().cuda,
    reason="needs a GPU and a library built with CUDA",
)
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
KEYS = st.one_of(st.integers(-4, 12), st.sampled_from([LOWEST, LOWEST + 1, HIGHEST]))


def key_set(keys) -> mask.KeySet:
    result = mask.KeySet()
    result.assign(np.array(keys, np.int64))
    return result


def slices(keys, values, dtype=np.int64, dense_shape=None) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.constant(values, tf.float32), tf.constant(np.array(keys, dtype)), dense_shape
    )


def reference(keys, values, masked, deduplicate):
    """(kept keys, kept values, rows left out, rows before masking)."""
    if deduplicate:
        unique = np.unique(keys)
        sums = []
        for key in unique:
            rows = values[keys == key]
            total = rows[0].copy()
            for row in rows[1:]:
                total += row
            sums.append(total)
        keys, values = unique, np.array(sums, np.float32).reshape(unique.size, *values.shape[1:])
    stays = np.array([key not in masked for key in keys.tolist()], bool)
    return keys[stays], values[stays], int((~stays).sum()), keys.size


def assert_equals_reference(keys, values, masked, dtype=np.int64):
    keys = np.array(keys, dtype)
    for deduplicate in (True, False):
        result = mask.mask_gradients(slices(keys, values, dtype), key_set(masked), deduplicate)
        expected = reference(keys, values, set(masked), deduplicate)
        assert result.slices.indices.dtype == dtype
        np.testing.assert_array_equal(result.slices.indices, expected[0])
        np.testing.assert_array_equal(result.slices.values, expected[1])
        assert (int(result.masked), int(result.offered)) == expected[2:]


@settings(deadline=None, max_examples=100)
@given(
    keys=st.lists(KEYS, max_size=40),
    masked=st.lists(KEYS, max_size=10),
    shape=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference(keys, masked, shape, seed):
    values = np.random.default_rng(seed).normal(size=(len(keys), *shape)).astype(np.float32)
    assert_equals_reference(keys, values, masked)
    if all(abs(key) < 100 for key in keys):
        assert_equals_reference(keys, values, masked, np.int32)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_many_rows_shared_among_threads(dtype):
    rng = np.random.default_rng(0)
    keys = np.minimum(rng.zipf(1.3, 60_000), 3_000_000).astype(dtype)
    values = (rng.normal(size=(60_000, 5)) * 10.0 ** rng.integers(-3, 4, (60_000, 1))).astype("f4")
    assert_equals_reference(keys, values, np.unique(keys)[::3].tolist(), dtype)


@needs_gpu
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 40_000])
def test_gpu_equals_the_cpu(dtype, deduplicate, rows):
    rng = np.random.default_rng(0)
    keys = np.minimum(rng.zipf(1.3, rows), 3_000_000).astype(dtype)
    values = rng.normal(size=(rows, 2, 3)).astype(np.float32)
    results = []
    for device in ("CPU:0", "GPU:0"):
        masked = mask.KeySet(device)
        masked.assign(np.unique(keys)[::3])
        with tf.device(device):
            gradients = slices(keys, values, dtype)
            result = mask.mask_gradients(gradients, masked, deduplicate)
        assert device in result.slices.values.device
        results.append(result)
    expected, found = results
    np.testing.assert_array_equal(found.slices.indices, expected.slices.indices)
    np.testing.assert_array_equal(found.slices.values, expected.slices.values)
    assert int(found.masked) == int(expected.masked)
    assert int(found.offered) == int(expected.offered)


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("masked", [[], [1, 2]])
def test_empty(deduplicate, masked):
    nothing = slices([], np.zeros((0, 3)), dense_shape=[9, 3])
    result = mask.mask_gradients(nothing, key_set(masked), deduplicate)
    assert result.slices.values.shape == (0, 3) and result.slices.indices.shape == (0,)
    assert int(result.masked) == int(result.offered) == 0


def test_everything_masked():
    result = mask.mask_gradients(slices([1, 2, 1], np.ones((3, 2))), key_set([2, 1]))
    assert result.slices.values.shape == (0, 2)
    assert (int(result.masked), int(result.offered)) == (2, 2)


def test_dense_shape_is_kept():
    for dense_shape in (None, [7, 2]):
        result = mask.mask_gradients(
            slices([1, 2], np.ones((2, 2)), dense_shape=dense_shape), key_set([2])
        )
        kept = result.slices.dense_shape
        assert kept is None if dense_shape is None else list(kept) == dense_shape


@pytest.mark.parametrize("keys", [[], [-3, 0, 5], [0, 0, 5], [5, 0, 7]], ids=str)
def test_keys_that_ascend_each_once_stay_as_they_are(keys):
    values = np.arange(2.0 * len(keys), dtype=np.float32).reshape(-1, 2)
    result = mask.mask_gradients(slices(keys, values), mask.KeySet())
    kept, sums, masked, offered = reference(keys, values, [], True)
    np.testing.assert_array_equal(result.slices.indices, kept)
    np.testing.assert_array_equal(result.slices.values, sums)
    assert (int(result.masked), int(result.offered)) == (masked, offered)


def test_rows_left_out_are_not_looked_at_and_others_are_passed_on():
    values = np.float32([[np.nan], [np.inf], [1.0], [-np.inf]])
    result = mask.mask_gradients(slices([0, 1, 2, 1], values), key_set([0]))
    np.testing.assert_array_equal(result.slices.values, np.float32([[np.nan], [1.0]]))
    result = mask.mask_gradients(slices([0, 1, 2, 1], values), key_set([1, 0]))
    np.testing.assert_array_equal(result.slices.values, [[1.0]])


def test_set_is_read_at_run_time_without_retracing():
    masked = mask.KeySet()
    traces = []

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int32), tf.TensorSpec(None, tf.float32)])
    def kept(keys, values):
        traces.append(1)
        result = mask.mask_gradients(tf.IndexedSlices(values, keys), masked)
        assert result.slices.indices.shape.rank == 1 and result.slices.values.shape.rank is None
        return result.slices.indices

    keys, values = np.int32([3, 1, 2]), np.ones((3, 1), np.float32)
    for content, expected in (([], [1, 2, 3]), ([1], [2, 3]), ([3, 2], [1]), ([], [1, 2, 3])):
        masked.assign(np.array(content, np.int64))
        np.testing.assert_array_equal(kept(keys, values), expected)
    assert len(traces) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3\] and \[2,1\]; allowed"):
        kept(keys, np.ones((2, 1), np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3\] and \[\]; allowed"):
        kept(keys, np.float32(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3,1\] and \[3,1\]; allowed"):
        kept(keys[:, None], values)


def test_assign_in_a_function_takes_effect_in_order():
    masked = mask.KeySet()

    @tf.function
    def step(content):
        masked.assign(content)
        first = mask.mask_gradients(slices([1, 2], np.ones((2, 1))), masked).slices.indices
        masked.assign(content + 1)
        return first, mask.mask_gradients(slices([1, 2], np.ones((2, 1))), masked).slices.indices

    first, second = step(tf.constant([1], tf.int64))
    assert list(first) == [2] and list(second) == [1]


def test_static_shapes():
    @tf.function
    def kept(keys, values):
        result = mask.mask_gradients(tf.IndexedSlices(values, keys), key_set([]))
        assert result.slices.values.shape.as_list() == [None, 2, 3]
        assert result.slices.indices.shape.as_list() == [None]
        assert result.masked.shape == result.offered.shape == ()
        return result.slices.values

    kept(tf.constant([1, 2]), tf.ones([2, 2, 3]))


def test_has_no_gradient():
    values = tf.Variable([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        kept = mask.mask_gradients(tf.IndexedSlices(values * 1.0, tf.constant([0])), key_set([]))
        total = tf.reduce_sum(kept.slices.values)
    assert tape.gradient(total, values) is None


def test_resource_dies_with_its_last_handle():
    handle = weakref.ref(mask.KeySet().handle)
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        (tf.ones([2, 3]), TypeError, "Invalid `gradients`: EagerTensor. Use a tf.IndexedSlices"),
        (
            tf.IndexedSlices(tf.ones([2, 1], tf.float64), tf.constant([0, 1])),
            TypeError,
            "values of float64, indices of int32",
        ),
        (
            tf.IndexedSlices(tf.ones([2, 1]), tf.constant([0, 1], tf.int16)),
            TypeError,
            "indices of int16",
        ),
        (
            tf.IndexedSlices(tf.ones([3, 1]), tf.constant([0, 1])),
            ValueError,
            r"indices of shape \(2,\) with values of shape \(3, 1\)",
        ),
        (tf.IndexedSlices(tf.ones([1, 2]), tf.constant([[0]])), ValueError, r"shape \(1, 1\)"),
        (tf.IndexedSlices(tf.ones([]), tf.constant([0])), ValueError, r"values of shape \(\)"),
    ],
)
def test_bad_gradients(gradients, error, message):
    with pytest.raises(error, match=message):
        mask.mask_gradients(gradients, key_set([]))


@pytest.mark.parametrize("keys", [[[1]], 1])
def test_bad_keys(keys):
    masked = key_set([1])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"allowed: \[n\]|rank"):
        masked.assign(keys)
    result = mask.mask_gradients(slices([1, 2], np.ones((2, 1))), masked)
    assert list(result.slices.indices) == [2], "a rejected call changes nothing"
    with pytest.raises((ValueError, TypeError)):
        masked.assign([1.5])


def test_handle_of_something_else():
    masked = key_set([])
    masked.handle = tf.Variable(1.0).handle
    with pytest.raises(tf.errors.OpError):
        mask.mask_gradients(slices([1], np.ones((1, 1))), masked)
    with pytest.raises(tf.errors.OpError):
        masked.assign([1])


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("key_set_assign", ("handle", "keys")),
        ("mask_gradients", ("handle", "keys", "gradients", "kept_keys", "kept_gradients")),
        ("mask_gradients", ("masked", "offered", "deduplicate")),
    ],
)
def test_every_argument_is_documented(op, arguments):
    doc = getattr(_loader.library(), "slipstream_" + op).__doc__
    for argument in arguments:
        assert f"{argument}: " in doc, argument
