"""`slipstream_tf.ops.hot_keys` matches exact counts and a NumPy reference."""

from __future__ import annotations

import collections
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops import _loader
from slipstream_tf.ops.hot_keys import HotKeySketch

needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU") or not _loader.build_info().cuda,
    reason="needs a GPU and a library built with CUDA",
)
DEVICES = ["CPU:0", pytest.param("GPU:0", marks=needs_gpu)]
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
BAD = (ValueError, tf.errors.InvalidArgumentError)


def count(sketch: HotKeySketch, keys, counts=None, device: str = "CPU:0"):
    with tf.device(device):
        keys = tf.constant(np.array(keys, np.int64))
        sketch.count(keys, None if counts is None else tf.constant(np.array(counts, bool)))


def ordered(exact: dict[int, float], k: int):
    """Returns the k most frequent keys and their counts.

    Ties are ordered by key.
    """
    order = sorted((key for key in exact if exact[key] > 0), key=lambda key: (-exact[key], key))[:k]
    return order, [exact[key] for key in order]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(0, 60))
def test_few_keys_are_counted_exactly(device, seed, k):
    rng = np.random.default_rng(seed)
    sketch, exact = HotKeySketch(1 << 16, device), collections.Counter()
    for _ in range(4):
        keys = rng.choice([LOWEST + 1, -7, -1, 0, 3, 4, 2**40, HIGHEST], rng.integers(0, 40))
        counts = rng.random(keys.size) < 0.8
        count(sketch, keys, counts, device)
        exact.update(keys[counts].tolist())
        sketch.decay(0.5)
        exact = collections.Counter({key: value / 2 for key, value in exact.items()})
    keys, counts = sketch.hottest(k)
    expected_keys, expected_counts = ordered(exact, k)
    assert keys.tolist() == expected_keys and counts.tolist() == expected_counts
    assert keys.dtype == np.int64 and counts.dtype == np.float32


@pytest.mark.parametrize("device", DEVICES)
def test_hottest_keys_are_found_among_many(device):
    rng = np.random.default_rng(0)
    sketch, exact = HotKeySketch(4096, device), collections.Counter()
    for _ in range(20):
        keys = rng.zipf(1.3, 20_000)
        count(sketch, keys, device=device)
        exact.update(keys.tolist())
    assert len(exact) > 4096, "more than a row has counters"
    keys, counts = sketch.hottest(100)
    expected, _ = ordered(exact, 100)
    assert len(set(keys.tolist()) & set(expected)) >= 98
    assert keys[:20].tolist() == expected[:20]
    assert (counts >= [exact[key] for key in keys.tolist()]).all()
    assert (np.diff(counts) <= 0).all()


def test_decay_rounds_down_to_multiple_of_1_256():
    sketch = HotKeySketch(2)
    count(sketch, [5])
    for factor, expected in ((1.0, 1.0), (0.3, 76 / 256), (0.5, 38 / 256), (0.0, 0.0)):
        sketch.decay(factor)
        assert sketch.accesses(tf.constant([5], tf.int64)).numpy().tolist() == [expected]
    assert sketch.hottest(3)[0].size == 0, "a count of 0"
    with pytest.raises(ValueError, match="`factor`"):
        sketch.decay(1.5)


def test_counting_in_graph_does_not_retrace():
    sketch, traces = HotKeySketch(64), []

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(keys):
        traces.append(1)
        assert sketch.accesses(keys).shape.as_list() == [None]
        sketch.count(keys)

    for keys in ([], [1, 2, 2], [2]):
        step(tf.constant(keys, tf.int64))
    assert sketch.hottest(5)[0].tolist() == [2, 1] and len(traces) == 1


def test_empty_batch_counts_nothing():
    sketch = HotKeySketch(2)
    count(sketch, [])
    keys, counts = sketch.hottest(4)
    assert keys.shape == counts.shape == (0,)
    assert sketch.accesses(tf.constant([], tf.int64)).shape == (0,)


def test_lowest_key_is_counted_but_not_listed():
    sketch = HotKeySketch(1024)
    count(sketch, [LOWEST, LOWEST, 3])
    assert sketch.accesses(tf.constant([LOWEST], tf.int64)).numpy() == 2.0
    assert sketch.hottest(4)[0].tolist() == [3]


@pytest.mark.parametrize("width", [1, 2**30 + 1, 2.5])
def test_invalid_width_raises(width):
    with pytest.raises(ValueError, match="`width`"):
        HotKeySketch(width)
    for log2_width in (0, 31):
        with pytest.raises(BAD, match="log2_width"):
            _loader.library().slipstream_hot_keys(log2_width=log2_width)


@pytest.mark.parametrize(
    ("keys", "counts"), [([[1]], [[True]]), (1, True), ([1, 2], [True]), ([1], [[True]])]
)
def test_invalid_keys_raise(keys, counts):
    sketch = HotKeySketch(16)
    with pytest.raises(BAD, match=r"expected|rank|Shapes|Dimension"):
        sketch.count(tf.constant(keys, tf.int64), tf.constant(counts))
    assert sketch.hottest(3)[0].size == 0
    with pytest.raises(BAD, match=r"expected|rank"):
        sketch.accesses(tf.constant([[1]], tf.int64))


@pytest.mark.parametrize("factor", [-0.1, 1.1, np.nan, [0.5]])
def test_invalid_factor_raises(factor):
    with pytest.raises(BAD, match=r"factor.*expected|rank"):
        _loader.library().slipstream_decay_accesses(
            handle=HotKeySketch(2).handle, factor=tf.constant(factor, tf.float64)
        )


def test_handle_of_other_resource_raises():
    sketch = HotKeySketch(2)
    sketch.handle = tf.Variable(1.0).handle
    keys = tf.constant([1], tf.int64)
    for call in (
        lambda: sketch.count(keys),
        lambda: sketch.decay(0.5),
        lambda: sketch.accesses(keys),
        lambda: sketch.hottest(1),
    ):
        with pytest.raises(tf.errors.OpError):
            call()


def test_resource_is_freed_with_last_handle():
    handle = weakref.ref(HotKeySketch(2).handle)
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("hot_keys", ("log2_width",)),
        ("count_accesses", ("handle", "keys", "counts", "unit")),
        ("decay_accesses", ("handle", "factor")),
        ("hot_key_candidates", ("handle",)),
        ("estimate_accesses", ("handle", "keys")),
    ],
)
def test_every_argument_is_documented(op, arguments):
    doc = getattr(_loader.library(), "slipstream_" + op).__doc__
    for argument in arguments:
        assert f"{argument}: " in doc, argument
