"""slipstream_tf.ops.key_map against a dictionary."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops import _loader
from slipstream_tf.ops.key_map import KeyMap

needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU") or not _loader.build_info().cuda,
    reason="needs a GPU and a library built with CUDA",
)
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
KEYS = st.one_of(st.integers(-4, 12), st.sampled_from([LOWEST, LOWEST + 1, HIGHEST]))


def key_map(keys, states=None, device: str | None = None) -> KeyMap:
    result = KeyMap(device)
    result.assign(np.array(keys, np.int64), states)
    return result


def assert_equals_reference(known, states, keys, device: str | None = None):
    index_of = {key: known.index(key) for key in known}
    indices = np.array([index_of.get(key, -1) for key in keys], np.int64)
    found = key_map(known, np.array(states, np.uint8), device)
    with tf.device(device):
        wanted = tf.constant(np.array(keys, np.int64))
    probed, found_states = found.probe(wanted), found.states(wanted)
    if device is not None:
        assert device in probed.hits.device and device in found_states.device
    np.testing.assert_array_equal(probed.indices, indices)
    np.testing.assert_array_equal(probed.hits, np.flatnonzero(indices >= 0))
    np.testing.assert_array_equal(probed.misses, np.flatnonzero(indices < 0))
    np.testing.assert_array_equal(found_states, [states[p] if p >= 0 else 0 for p in indices])


@settings(deadline=None, max_examples=100)
@given(
    known=st.lists(KEYS, max_size=20),
    keys=st.lists(KEYS, max_size=30),
    states=st.lists(st.integers(0, 255), min_size=20, max_size=20),
)
def test_equals_a_dictionary(known, keys, states):
    assert_equals_reference(known, states[: len(known)], keys)


@pytest.mark.parametrize("device", ["CPU:0", pytest.param("GPU:0", marks=needs_gpu)])
@pytest.mark.parametrize("n", [0, 1, 50_000])
def test_many_keys(device, n):
    rng = np.random.default_rng(0)
    known = np.unique(rng.zipf(1.2, 9000)).tolist()
    states = rng.integers(0, 256, len(known)).tolist()
    assert_equals_reference(known, states, rng.zipf(1.2, n).tolist(), device)


def test_an_empty_map_has_no_key():
    found = KeyMap()
    probed = found.probe(tf.constant([0, LOWEST], tf.int64))
    assert list(probed.indices) == [-1, -1] and list(probed.misses) == [0, 1]
    assert probed.hits.shape == (0,)
    assert list(found.states(tf.constant([0, 5], tf.int64))) == [0, 0]


def test_without_states_all_are_0():
    assert list(key_map([4]).states(tf.constant([4], tf.int64))) == [0]


def test_content_is_read_at_run_time_without_retracing():
    found, traces = KeyMap(), []

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def look(keys):
        traces.append(1)
        probed = found.probe(keys)
        assert probed.indices.shape.rank == probed.hits.shape.rank == probed.misses.shape.rank == 1
        return probed.indices, probed.hits, found.states(keys)

    keys = tf.constant([3, 1, 2], tf.int64)
    for known, states in (([], []), ([2, 1], [7, 8]), ([3], [255])):
        found.assign(np.array(known, np.int64), np.array(states, np.uint8))
        indices, hits, seen = look(keys)
        expected = [known.index(key) if key in known else -1 for key in (3, 1, 2)]
        assert list(indices) == expected
        assert list(hits) == [i for i, place in enumerate(expected) if place >= 0]
        assert list(seen) == [states[p] if p >= 0 else 0 for p in expected]
    assert len(traces) == 1


def test_static_shapes():
    found = KeyMap()

    @tf.function
    def look(keys):
        probed = found.probe(keys)
        assert probed.indices.shape == found.states(keys).shape == (2,)
        assert probed.hits.shape.as_list() == probed.misses.shape.as_list() == [None]
        return probed.hits

    look(tf.constant([1, 2], tf.int64))


@pytest.mark.parametrize(
    ("keys", "states"), [([[1]], None), (1, None), ([1, 2], [1]), ([1], [[1]]), ([], [1])]
)
def test_bad_content(keys, states):
    found = key_map([1])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"allowed|rank"):
        found.assign(np.array(keys, np.int64), states)
    assert list(found.probe(tf.constant([1, 2], tf.int64)).indices) == [0, -1], "changes nothing"
    with pytest.raises((ValueError, TypeError)):
        found.assign([1.5])


@pytest.mark.parametrize("keys", [[[1]], 1])
def test_bad_keys(keys):
    found = key_map([1])
    for look in (found.probe, found.states):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"allowed|rank"):
            look(tf.constant(keys, tf.int64))


def test_handle_of_something_else():
    found = KeyMap()
    found.handle = tf.Variable(1.0).handle
    for call in (found.assign, found.probe, found.states):
        with pytest.raises(tf.errors.OpError):
            call(tf.constant([1], tf.int64))


def test_resource_dies_with_its_last_handle():
    handle = weakref.ref(KeyMap().handle)
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("key_map_assign", ("handle", "keys", "states")),
        ("probe_keys", ("handle", "keys", "indices", "hits", "misses")),
        ("look_up_states", ("handle", "keys")),
    ],
)
def test_every_argument_is_documented(op, arguments):
    doc = getattr(_loader.library(), "slipstream_" + op).__doc__
    for argument in arguments:
        assert f"{argument}: " in doc, argument
