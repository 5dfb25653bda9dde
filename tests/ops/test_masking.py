"""Masked gradients match the definition on all paths."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from definitions import KeptRows, assert_same_bits, sum_and_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf import optimizers
from slipstream_tf.config import Table
from slipstream_tf.ops import _loader, exchange, features, mask, update_policy
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import NativeStore, VariableStore

needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU") or not _loader.build_info().cuda,
    reason="needs a GPU and a library built with CUDA",
)
DEVICES = ["CPU:0", pytest.param("GPU:0", marks=needs_gpu)]
SPECS = [FeatureSpec("f", "t", padding_key=None)]
DIM = 3
# A power of two, so that products with it are exact.
RATE = 0.25
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
KEYS = st.one_of(st.integers(-4, 12), st.sampled_from([LOWEST, LOWEST + 1, HIGHEST]))


def key_set(keys, device=None) -> mask.KeySet:
    result = mask.KeySet(device)
    result.assign(np.array(keys, np.int64))
    return result


def slices(keys, values, dtype=np.int64, dense_shape=None) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.constant(values, tf.float32), tf.constant(np.array(keys, dtype)), dense_shape
    )


def mask_by_op(keys, rows, masked, deduplicate=True, device="CPU:0") -> KeptRows:
    with tf.device(device):
        gradients = slices(keys, rows, keys.dtype)
        result = mask.mask_gradients(gradients, key_set(masked, device), deduplicate)
    assert device in result.slices.values.device
    kept = result.slices
    counts = int(result.masked), int(result.offered)
    return KeptRows(kept.indices.numpy(), kept.values.numpy(), *counts)


def mask_by_native_table(keys, rows, masked) -> KeptRows:
    """Masks with a native table that uses SGD.

    The sums are derived from how far SGD moves the rows. A key with the sum 0 is missing in the
    result.
    """
    store = NativeStore([Table("t", DIM)], optimizers.SGD(RATE))
    own = np.unique([*keys, *masked]).astype(np.int64)
    store.write_rows("t", own, np.zeros((own.size, DIM), np.float32))
    store.set_update_policy("t", UpdatePolicy("mask"))
    store.set_row_flags("t", masked, np.full(len(masked), SATURATED))
    _, plan = store.lookup(features.pack({"f": keys}, SPECS), training=True)
    store.apply_gradients(plan, [tf.constant(rows)])
    sums = (0 - store.gather("t", own)[0].numpy()) / np.float32(RATE)
    moved = (sums != 0).any(axis=1)
    counts = store.update_counts("t")
    return KeptRows(own[moved], sums[moved], counts.masked, counts.offered)


def mask_by_exchange(keys, rows, masked) -> KeptRows:
    """Masks with the exchange and returns the sums sent to other ranks."""
    handle = table_ops.create(Table("t", DIM), optimizers.SGD(RATE))
    own = np.unique([*keys, *masked]).astype(np.int64)
    table_ops.write(handle, own, np.zeros((own.size, DIM), np.float32))
    update_policy.set_policy(handle, UpdatePolicy("mask", is_exchanged=True))
    update_policy.set_row_flags(handle, masked, np.full(len(masked), SATURATED))
    layout = table_ops.LookupLayout((0,), ("sum",), (DIM,), False)
    _, plan = table_ops.lookup([handle], features.pack({"f": keys}, SPECS), layout)
    sent = exchange.collect_gradients(plan, [tf.constant(rows)], RATE)
    order = np.argsort(sent.keys.numpy())
    counts = update_policy.update_counts(handle)
    sums = sent.values.numpy().reshape(-1, DIM)[order]
    return KeptRows(sent.keys.numpy()[order], sums, counts.masked, counts.offered)


def mask_by_variable_store(keys, rows, masked) -> KeptRows:
    """Masks with a variable store.

    Row i of the variable belongs to the i-th smallest key.
    """
    own = np.unique([*keys, *masked, 0]).astype(np.int64)
    store = VariableStore({"t": tf.Variable(tf.zeros([own.size, DIM]))})
    store.set_update_policy("t", UpdatePolicy("mask"))
    store.set_saturated("t", np.searchsorted(own, masked))
    indices = np.searchsorted(own, keys)
    kept = store.filter_gradient("t", slices(indices, rows, dense_shape=[own.size, DIM]))
    counts = store.update_counts("t")
    return KeptRows(own[kept.indices.numpy()], kept.values.numpy(), counts.masked, counts.offered)


TABLES = {
    "native": mask_by_native_table,
    "exchange": mask_by_exchange,
    "variable": mask_by_variable_store,
}


def assert_same(found, expected):
    assert_same_bits(found.keys, expected.keys)
    assert_same_bits(found.rows, expected.rows)
    assert (found.masked, found.offered) == (expected.masked, expected.offered)


def assert_op_equals_the_definition(keys, rows, masked, dtype=np.int64, device="CPU:0"):
    keys = np.array(keys, dtype)
    for deduplicate in (True, False):
        found = mask_by_op(keys, rows, masked, deduplicate, device)
        assert_same(found, sum_and_mask(keys, rows, masked, deduplicate))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=100)
@given(
    keys=st.lists(KEYS, max_size=40),
    masked=st.lists(KEYS, max_size=10),
    shape=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    seed=st.integers(0, 2**31),
)
def test_op_equals_definition(device, keys, masked, shape, seed):
    values = np.random.default_rng(seed).normal(size=(len(keys), *shape)).astype(np.float32)
    assert_op_equals_the_definition(keys, values, masked, device=device)
    if all(abs(key) < 100 for key in keys):
        assert_op_equals_the_definition(keys, values, masked, np.int32, device)


@pytest.mark.parametrize("table", TABLES)
@settings(max_examples=30)
@given(
    keys=st.lists(KEYS, max_size=40),
    masked=st.lists(KEYS, max_size=10, unique=True),
    seed=st.integers(0, 2**31),
)
def test_tables_equal_definition(table, keys, masked, seed):
    keys, masked = np.array(keys, np.int64), np.array(masked, np.int64)
    rng, shape = np.random.default_rng(seed), (keys.size, DIM)
    if table == "native":
        # Sums of these numbers are exact, so that the sums can be derived from the rows.
        rows = rng.integers(-64, 65, shape).astype(np.float32) / 32
    else:
        rows = rng.normal(size=shape).astype(np.float32)
    expected = sum_and_mask(keys, rows, masked.tolist())
    if table == "native":
        moved = (expected.rows != 0).any(axis=1)
        counts = expected.masked, expected.offered
        expected = KeptRows(expected.keys[moved], expected.rows[moved], *counts)
    assert_same(TABLES[table](keys, rows, masked), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "rows, shape", [(60_000, (5,)), (40_000, (2, 4)), (1, (2, 3)), (0, (2, 3))]
)
def test_threaded_masking_equals_definition(device, dtype, rows, shape):
    rng = np.random.default_rng(0)
    keys = np.minimum(rng.zipf(1.3, rows), 3_000_000).astype(dtype)
    scale = 10.0 ** rng.integers(-3, 4, (rows, *[1] * len(shape)))
    values = (rng.normal(size=(rows, *shape)) * scale).astype(np.float32)
    masked = np.unique(keys)[::3].tolist()
    assert_op_equals_the_definition(keys, values, masked, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("different_keys", [1, 5, 4000])
@pytest.mark.parametrize("dim", [0, 1, 3, 16, 33])
@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 5000])
def test_all_row_sizes_equal_definition(device, rows, dim, different_keys):
    rng = np.random.default_rng(rows + dim)
    keys = rng.integers(0, different_keys, rows) - different_keys // 3
    values = rng.normal(size=(rows, dim)) * 10.0 ** rng.integers(-3, 4, (rows, 1))
    masked = range(-different_keys, different_keys, 3)
    dtype = (np.int32, np.int64)[dim % 2]
    assert_op_equals_the_definition(keys, values.astype(np.float32), masked, dtype, device)


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("masked", [[], [1, 2]])
def test_empty_gradients_return_empty_result(deduplicate, masked):
    nothing = slices([], np.zeros((0, 3)), dense_shape=[9, 3])
    result = mask.mask_gradients(nothing, key_set(masked), deduplicate)
    assert result.slices.values.shape == (0, 3) and result.slices.indices.shape == (0,)
    assert int(result.masked) == int(result.offered) == 0


def test_all_rows_masked_returns_no_rows():
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
def test_sorted_unique_keys_are_unchanged(keys):
    values = np.arange(2.0 * len(keys), dtype=np.float32).reshape(-1, 2)
    keys = np.array(keys, np.int64)
    found = mask_by_op(keys, values, [])
    assert_same(found, sum_and_mask(keys, values, []))


def test_nonfinite_values_are_ignored_in_masked_rows_only():
    values = np.float32([[np.nan], [np.inf], [1.0], [-np.inf]])
    result = mask.mask_gradients(slices([0, 1, 2, 1], values), key_set([0]))
    np.testing.assert_array_equal(result.slices.values, np.float32([[np.nan], [1.0]]))
    result = mask.mask_gradients(slices([0, 1, 2, 1], values), key_set([1, 0]))
    np.testing.assert_array_equal(result.slices.values, [[1.0]])


def test_key_set_change_does_not_retrace():
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
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3\] and \[2,1\]; expected"):
        kept(keys, np.ones((2, 1), np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3\] and \[\]; expected"):
        kept(keys, np.float32(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3,1\] and \[3,1\]; expected"):
        kept(keys[:, None], values)


def test_assign_in_function_takes_effect_in_order():
    masked = mask.KeySet()

    @tf.function
    def step(content):
        masked.assign(content)
        first = mask.mask_gradients(slices([1, 2], np.ones((2, 1))), masked).slices.indices
        masked.assign(content + 1)
        return first, mask.mask_gradients(slices([1, 2], np.ones((2, 1))), masked).slices.indices

    first, second = step(tf.constant([1], tf.int64))
    assert list(first) == [2] and list(second) == [1]


def test_static_shapes_are_inferred():
    @tf.function
    def kept(keys, values):
        result = mask.mask_gradients(tf.IndexedSlices(values, keys), key_set([]))
        assert result.slices.values.shape.as_list() == [None, 2, 3]
        assert result.slices.indices.shape.as_list() == [None]
        assert result.masked.shape == result.offered.shape == ()
        return result.slices.values

    kept(tf.constant([1, 2]), tf.ones([2, 2, 3]))


def test_masking_has_no_gradient():
    values = tf.Variable([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        kept = mask.mask_gradients(tf.IndexedSlices(values * 1.0, tf.constant([0])), key_set([]))
        total = tf.reduce_sum(kept.slices.values)
    assert tape.gradient(total, values) is None


def test_resource_is_freed_with_last_handle():
    handle = weakref.ref(mask.KeySet().handle)
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        (
            tf.ones([2, 3]),
            TypeError,
            "Invalid `gradients`: EagerTensor .* Expected a tf.IndexedSlices",
        ),
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
def test_invalid_gradients_raise(gradients, error, message):
    with pytest.raises(error, match=message):
        mask.mask_gradients(gradients, key_set([]))


@pytest.mark.parametrize("keys", [[[1]], 1])
def test_invalid_keys_raise(keys):
    masked = key_set([1])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"expected \[n\]|rank"):
        masked.assign(keys)
    result = mask.mask_gradients(slices([1, 2], np.ones((2, 1))), masked)
    assert list(result.slices.indices) == [2], "a rejected call changes nothing"
    with pytest.raises((ValueError, TypeError)):
        masked.assign([1.5])


def test_handle_of_other_resource_raises():
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
