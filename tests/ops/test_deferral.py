"""Deferred gradients match the definition on all paths."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import weakref

import numpy as np
import pytest
import tensorflow as tf
from deferral_paths import DIM, KEYS, RATE, BufferPath, ExchangePath, NativePath, VariablePath
from definitions import COUNTS, assert_same_bits, sum_and_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops import _loader
from slipstream_tf.ops.deferred_gradients import AddedSums, DeferredGradients
from slipstream_tf.ops.mask import KeySet
from slipstream_tf.ops.update_policy import UpdatePolicy

needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU") or not _loader.build_info().cuda,
    reason="needs a GPU and a library built with CUDA",
)
DEVICES = ["CPU:0", pytest.param("GPU:0", marks=needs_gpu)]
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
INTERVAL = UpdatePolicy("defer", "interval", max_age=4, max_rows=6)
MOVEMENT = UpdatePolicy("defer", "movement", movement=1.0, max_age=4, max_rows=6)
BAD = (ValueError, tf.errors.InvalidArgumentError)


PATHS = {
    "buffers": BufferPath,
    "native": NativePath,
    "exchange": ExchangePath,
    "variable": VariablePath,
}


def on_paths(*names):
    """Parametrizes over factories of paths.

    Buffers run on a CPU and on a GPU.
    """
    found = []
    for name in names or PATHS:
        if name == "buffers":
            found.append(pytest.param(BufferPath, id="buffers-CPU:0"))
            on_gpu = functools.partial(BufferPath, "GPU:0")
            found.append(pytest.param(on_gpu, marks=needs_gpu, id="buffers-GPU:0"))
        else:
            found.append(pytest.param(PATHS[name], id=name))
    return pytest.mark.parametrize("make_path", found)


def some_rows(rng, n, path):
    """Returns random keys and gradients of one step that the path supports."""
    if path.sums_rows:
        keys = rng.choice(path.keys, n)
    else:
        keys = np.sort(rng.choice(path.keys, min(n, path.keys.size), replace=False))
    shape = (keys.size, path.dim)
    if path.is_exact:
        gradients = rng.normal(scale=0.5, size=shape).astype(np.float32)
    else:
        gradients = rng.integers(-40, 41, shape).astype(np.float32) / 32
    if path.takes_non_finite:
        gradients[rng.random(keys.size) < 0.05, 1] = np.nan
    return keys, gradients


def some_settings(rng, path):
    """Returns a random policy, capacity and saturated keys that the path supports."""
    mode = "defer" if rng.random() < 0.8 else path.plain_mode
    trigger = ("movement", "interval")[rng.integers(2)]
    ages, rows = rng.integers(1, 7), rng.integers(0, 12)
    if not path.has_one_budget:
        # Memory for all sums or for none, because budgets per shard differ from the definition
        # otherwise.
        rows = 64 * KEYS.size * (rows > 2)
    limit = 0.8 * path.movement_of_one()
    policy = UpdatePolicy(mode, trigger, limit, max_age=int(ages), max_rows=int(rows))
    capacity = int(rng.integers(0, 12)) if path.has_capacity else math.inf
    return policy, capacity, rng.choice(path.keys, 12, replace=False).tolist()


def assert_due(path, due, expected):
    """Asserts that due keys and sums are equal bit for bit."""
    keys, sums = expected
    if not path.is_exact:
        has_moved = (sums != 0).any(axis=1)
        keys, sums = keys[has_moved], sums[has_moved]
    assert due[0].tolist() == keys.tolist()
    assert_same_bits(due[1], sums)


def assert_state(path, definition):
    """Asserts that counts and deferred sums are equal."""
    counts = {name: n for name, n in path.counts().items() if name in COUNTS}
    assert counts == {name: definition.counts[name] for name in counts} and len(counts) > 5
    assert path.deferred() == definition.deferred()


def configure(path, definition, policy, capacity, saturated):
    """Configures a path and returns the update rule of the next steps."""
    keeps_sums = path.keeps_sums or policy.keeps_sums_of(path.policy)
    due = path.configure(policy, capacity, saturated)
    if path.flushes_at_once:
        assert_due(path, due, definition.empty() if keeps_sums else definition.flush())
    elif not keeps_sums:
        definition.flush_with_next_step()
    return path.rule(max(capacity, len(definition.sums)))


def flush(path, definition):
    due = path.flush()
    if path.flushes_at_once:
        assert_due(path, due, definition.flush())
    else:
        definition.flush_with_next_step()


def take_step(path, definition, rule, keys, gradients):
    summed = sum_and_mask(keys, gradients, ())
    expected = definition.step(rule, summed.keys, summed.rows)
    assert_due(path, path.due(keys, gradients), expected)
    assert_state(path, definition)


def run_steps(path, seed, steps=15):
    """Runs random steps and compares all results with the definition."""
    rng, definition = np.random.default_rng(seed), path.definition()
    for step in range(steps):
        if step % 4 == 0:
            rule = configure(path, definition, *some_settings(rng, path))
        if rng.random() < 0.15:
            flush(path, definition)
        if isinstance(path, BufferPath):
            assert path.buffer.state().flushes == definition.flushes
        take_step(path, definition, rule, *some_rows(rng, rng.integers(0, 14), path))
        # Sums can be restored only under a policy that defers.
        can_restart = path.keeps_sums or path.policy.mode == "defer" or not definition.sums
        if can_restart and rng.random() < 0.2:
            path = path.restarted()
            definition.counts = dict.fromkeys(COUNTS, 0)
            assert path.deferred() == definition.deferred()
    flush(path, definition)
    take_step(path, definition, rule, *some_rows(rng, 0, path))


@on_paths("buffers")
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_buffers_equal_definition(make_path, seed):
    # GPU kernels handle rows of 4 and of 3 numbers differently.
    run_steps(make_path(dim=3 + seed % 2), seed)


@on_paths("native", "exchange", "variable")
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1))
def test_tables_equal_definition(make_path, seed):
    run_steps(make_path(), seed)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("trigger", ["movement", "interval"])
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1))
def test_simulated_ranks_equal_one_definition_per_rank(ranks, trigger, seed):
    rng, path = np.random.default_rng(seed), NativePath()
    definitions = [path.definition() for _ in range(ranks)]
    limit, room = 0.8 * RATE, 64 * ranks * KEYS.size
    policy = UpdatePolicy("defer", trigger, limit, max_age=4, max_rows=room, ranks=ranks)
    path.configure(policy, 0, rng.choice(KEYS, 8, replace=False).tolist())
    for _ in range(12):
        # Each rank has an equal part of the batch, in the order of the examples.
        n = int(rng.integers(0, 8))
        parts = [some_rows(rng, n, path) for _ in range(ranks)]
        summed = [sum_and_mask(keys, gradients, ()) for keys, gradients in parts]
        due = [
            definition.step(path.rule(math.inf), rows.keys, rows.rows)
            for definition, rows in zip(definitions, summed, strict=True)
        ]
        # A table sums all due gradients of a key and applies the sum once.
        total = sum_and_mask(*(np.concatenate(column) for column in zip(*due, strict=True)), ())
        batch = [np.concatenate(column) for column in zip(*parts, strict=True)]
        assert_due(path, path.due(*batch), (total.keys, total.rows))
        counts = {name: count for name, count in path.counts().items() if name in COUNTS}
        for name, count in counts.items():
            assert count == sum(definition.counts[name] for definition in definitions), name
        assert path.counts()["deferred_now"] == sum(len(each.sums) for each in definitions)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("keys", "ages", "shape", "why"),
    [
        ([1, 2, 1], [0, 0, 0], (3, DIM), "key 1 occurs twice"),
        ([LOWEST], [0], (1, DIM), "cannot be deferred"),
        ([7], [-1], (1, DIM), r"ages\[0\] for key 7 is -1"),
        ([7, 8], [1], (2, DIM), "."),
        ([7], [1], (1, DIM + 1), "."),
    ],
)
def test_undeferrable_gradients_raise(device, keys, ages, shape, why):
    path = BufferPath(device)
    path.configure(INTERVAL, 2, [5])
    path.step([5])
    with pytest.raises(BAD, match=why):
        path.buffer.replace(np.array(keys), np.array(ages), np.ones(shape, np.float32))
    kept = path.buffer.export()
    assert kept[0].tolist() == [5] and kept[1].tolist() == [0]
    path.buffer.replace(np.empty(0), np.empty(0), np.empty((0, DIM)))
    assert path.buffer.state().num_deferred == 0


@pytest.mark.parametrize("device", DEVICES)
def test_many_rows_equal_definition(device):
    rng = np.random.default_rng(0)
    path = BufferPath(device)
    definition = path.definition()
    path.configure(dataclasses.replace(MOVEMENT, max_rows=3000), 3000)
    for _ in range(8):
        keys = np.unique(rng.zipf(1.2, 9000))
        gradients = rng.normal(scale=0.4, size=(keys.size, DIM)).astype(np.float32)
        due = path.due(keys, gradients)
        assert_due(path, due, definition.step(path.rule(3000), keys, gradients))
    assert_state(path, definition)
    assert definition.counts["deferred"] > 0 and definition.counts["over_budget"] > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_movement", [False, True])
@pytest.mark.parametrize(
    ("rows", "dim", "capacity", "max_rows", "max_age"),
    [
        (1, 1, 0, 1000, 4),
        (1, 33, 1, 1000, 4),
        (40, 5, 17, 1000, 4),
        (40, 33, 300, 1000, 4),
        (700, 1, 1, 1000, 4),
        (700, 5, 2000, 1000, 4),
        (700, 33, 300, 1000, 4),
        (200, 2, 300, 0, 1),
        (200, 2, 300, 1, 1000),
        (200, 2, 300, 16, 1000),
        (200, 2, 300, 299, 1000),
    ],
)
def test_buffer_sizes_follow_capacity(device, by_movement, rows, dim, capacity, max_rows, max_age):
    rng = np.random.default_rng(rows + dim)
    path = BufferPath(device, dim)
    definition = path.definition()
    trigger = "movement" if by_movement else "interval"
    policy = UpdatePolicy("defer", trigger, 60.0, max_age=max_age, max_rows=max_rows)
    saturated = range(-300, 600, 2)
    for step in range(1, 21):
        if step in (1, 15):
            # No gradient is deferred from step 15 on.
            mode = "defer" if step == 1 else "mask"
            path.configure(dataclasses.replace(policy, mode=mode), capacity, saturated)
        if step in (9, 18):
            flush(path, definition)
        keys = np.unique(rng.integers(-300, 600, 0 if step % 6 == 5 else rows))
        gradients = rng.uniform(-40, 44, (keys.size, dim)).astype(np.float32)
        due = path.due(keys, gradients)
        room = max(capacity, len(definition.sums))
        assert_due(path, due, definition.step(path.rule(room), keys, gradients))
        assert_state(path, definition)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_steps_and_zero_capacity(device):
    path = BufferPath(device)
    assert path.step([]).sums.shape == (0, DIM), "before it is configured"
    assert path.step([4]).keys.numpy().tolist() == [4]
    path.configure(INTERVAL, 0, {4})
    assert path.step([4]).keys.numpy().tolist() == [4], "there is no room"
    path.configure(INTERVAL, 2, {4})
    assert path.step([4]).keys.shape == (0,)
    assert [path.step([]).keys.numpy().tolist() for _ in range(4)] == [[], [], [], [4]]
    assert path.buffer.state().num_deferred == 0


@pytest.mark.parametrize("device", DEVICES)
def test_deferred_sums_survive_capacity_change(device):
    path = BufferPath(device)
    path.configure(INTERVAL, 5, {1, 2, 3, 4})
    assert path.step([1, 2, 3, 4]).keys.shape == (0,)
    for capacity, expected in ((3, 4), (40, 40), (0, 4)):
        path.configure(INTERVAL, capacity, {1, 3, 4})
        assert path.buffer.state().nbytes == expected * (16 + 4 * DIM)
        assert path.buffer.state().num_deferred == 4
    due = path.step([2, 3])
    assert due.keys.numpy().tolist() == [2] and due.sums.numpy()[0, 0] == 2.0
    path.buffer.flush()
    due = path.step([])
    assert due.keys.numpy().tolist() == [1, 3, 4]
    np.testing.assert_array_equal(due.sums[:, 0], [1.0, 2.0, 1.0])
    path.configure(UpdatePolicy(), 0)
    assert path.buffer.state().nbytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_replacing_sums_cancels_flush(device):
    path = BufferPath(device)
    path.configure(INTERVAL, 4, {1, 2})
    path.step([1])
    path.buffer.flush()
    path.buffer.replace(np.array([2]), np.array([0]), np.ones((1, DIM), np.float32))
    assert not path.buffer.state().flushes
    assert path.step([]).keys.shape == (0,)
    assert path.buffer.state().num_deferred == 1


@pytest.mark.parametrize("device", DEVICES)
def test_shadow_mode_is_reported_and_flush_can_drop_sums(device):
    path = BufferPath(device)
    shadow = dataclasses.replace(INTERVAL, is_shadow=True)
    path.configure(shadow, 6, {1, 2})
    assert bool(path.step([1, 2, 3]).is_shadow)
    path.buffer.flush(drops=True)
    state = path.buffer.state()
    assert (state.num_deferred, state.counts.flushed, state.counts.without_gradient) == (0, 2, 2)
    assert not state.flushes and state.nbytes > 0
    assert path.step([1]).keys.shape == (0,), "its sum begins anew"
    path.buffer.flush()
    path.buffer.flush(drops=True)
    assert path.buffer.state().flushes, "they are on their way out"
    due = path.step([])
    assert not bool(due.is_shadow) and due.keys.numpy().tolist() == [1]


def test_rule_change_does_not_retrace():
    path, traces = BufferPath(), []

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)]
    )
    def step(keys, gradients):
        traces.append(1)
        due = path.run(keys, gradients, 10.0)
        assert due.keys.shape.as_list() == [None] and due.sums.shape.as_list() == [None, DIM]
        return due.keys, due.is_shadow, due.defers

    one = tf.constant([7], tf.int64), tf.ones([1, DIM])
    shadow = dataclasses.replace(INTERVAL, is_shadow=True)
    for policy, flagged, expected in (
        (INTERVAL, {7}, ([], False, True)),
        (MOVEMENT, (), ([], False, True)),
        (INTERVAL, (), ([7], False, True)),
        (shadow, {7}, ([], True, True)),
        (UpdatePolicy(), (), ([7], False, False)),
    ):
        path.configure(policy, 4, flagged)
        keys, is_shadow, defers = step(*one)
        assert (keys.numpy().tolist(), bool(is_shadow), bool(defers)) == expected
    assert len(traces) == 1


def test_unknown_gradient_shapes_are_inferred():
    path = BufferPath()

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64), tf.TensorSpec(None, tf.float32)])
    def step(keys, gradients):
        added = path.buffer.add(keys, gradients)
        assert added.indices.shape.rank == 1 and added.sums.shape.rank == 2
        due = path.buffer.take_due(path.flagged, keys, added, tf.zeros_like(keys, tf.bool))
        assert due.sums.shape.as_list() == [None, DIM]
        return due.keys

    assert step(tf.constant([2], tf.int64), tf.ones([1, DIM])).numpy().tolist() == [2]


def test_all_keys_except_lowest_can_be_deferred():
    path = BufferPath()
    path.configure(INTERVAL, 6, {LOWEST, LOWEST + 1, HIGHEST})
    assert path.step([LOWEST, LOWEST + 1, HIGHEST]).keys.numpy().tolist() == [LOWEST]
    assert path.buffer.state().num_deferred == 2


@pytest.mark.parametrize(
    ("keys", "shape"),
    [([[1]], [1, DIM]), ([1, 2], [1, DIM]), ([1], [1, DIM + 1]), ([1], [DIM]), (1, [1, DIM])],
)
def test_invalid_gradient_shapes_raise(keys, shape):
    with pytest.raises(BAD, match=r"expected|rank|Dimension"):
        BufferPath().buffer.add(tf.constant(keys, tf.int64), tf.ones(shape))


@pytest.mark.parametrize(
    "change",
    [
        {"indices": [-1]},
        {"indices": [[-1, -1]]},
        {"sums": [[1.0] * DIM]},
        {"sums": [[1.0] * (DIM + 1)] * 2},
        {"may_wait": [True]},
        {"may_wait": True},
        *({"indices": indices} for indices in ([-1, 0], [-1, 1], [-2, -1], [-1, 4])),
    ],
)
def test_rejected_second_call_changes_nothing(change):
    path = BufferPath()
    path.configure(INTERVAL, 4, {5, 6})
    path.step([5])
    keys = tf.constant([5, 6], tf.int64)
    added = path.buffer.add(keys, tf.ones([2, DIM]))
    assert added.indices.numpy().tolist() == [0, -1] and not bool(added.by_movement)
    may_wait = tf.constant(change.pop("may_wait", [True, True]))
    types = {"indices": tf.int64, "sums": tf.float32}
    changed = {name: tf.constant(value, types[name]) for name, value in change.items()}
    with pytest.raises(BAD, match=r"expected|rank|Dimension|Shapes"):
        path.buffer.take_due(path.flagged, keys, added._replace(**changed), may_wait)
    assert path.buffer.state().counts.deferred == 1
    due = path.buffer.take_due(path.flagged, keys, added, tf.constant([True, True]))
    assert due.keys.shape == (0,) and path.buffer.state().num_deferred == 2
    # The rejected call did not make the deferred gradient of key 5 older.
    assert [path.step([]).keys.numpy().tolist() for _ in range(3)] == [[], [], [5]]


def test_duplicate_key_raises():
    with pytest.raises(BAD, match=r"keys\[[02]\].*expected distinct keys"):
        BufferPath().step([3, 4, 3])


@pytest.mark.parametrize(
    ("name", "value"), [("capacity", -1), ("max_rows", -1), ("max_age", 0), ("capacity", [1])]
)
def test_invalid_settings_raise(name, value):
    numbers = {"capacity": 1, "max_rows": 1, "max_age": 1, name: value}
    tensors = {key: tf.constant(number, tf.int64) for key, number in numbers.items()}
    buffer = DeferredGradients(DIM)
    with pytest.raises(BAD, match=rf"{name}.*expected|rank"):
        _loader.library().slipstream_deferred_gradients_configure(
            handle=buffer.handle, **tensors, defers=True, by_movement=True
        )
    assert buffer.state().nbytes == 0


def test_capacity_beyond_memory_raises():
    path = BufferPath()
    path.configure(INTERVAL, 2, {1})
    path.step([1])
    for capacity in (2**62, 2**44):
        with pytest.raises(tf.errors.OpError):
            path.buffer.configure(INTERVAL, capacity)
    assert path.buffer.state().num_deferred == 1
    assert path.step([1]).keys.shape == (0,)


@pytest.mark.parametrize("dim", [-1, 0, 65537, 2**63 - 1])
def test_invalid_dim_raises(dim):
    message = f"dim of deferred gradients is {dim}; expected an integer from 1 to 65536"
    with pytest.raises(BAD, match=message):
        DeferredGradients(dim)


def test_largest_dim_is_accepted():
    buffer = DeferredGradients(65536)
    added = buffer.add(tf.constant([1], tf.int64), tf.ones([1, 65536]))
    assert added.sums.shape == (1, 65536)


def test_handle_of_other_resource_raises():
    buffer, other = DeferredGradients(DIM), KeySet()
    added = buffer.add(tf.constant([1], tf.int64), tf.ones([1, DIM]))
    buffer.handle = other.handle
    keys, may_wait = tf.constant([1], tf.int64), tf.constant([True])
    for call in (
        buffer.state,
        buffer.flush,
        lambda: buffer.configure(INTERVAL, 1),
        lambda: buffer.add(keys, tf.ones([1, DIM])),
        lambda: buffer.take_due(other, keys, added, may_wait),
    ):
        with pytest.raises(tf.errors.OpError):
            call()
    sound, no_set = DeferredGradients(DIM), KeySet()
    no_set.handle = sound.handle
    with pytest.raises(tf.errors.OpError):
        sound.take_due(no_set, keys, AddedSums(*added), may_wait)


def test_resource_is_freed_with_last_handle():
    handle = weakref.ref(DeferredGradients(DIM).handle)
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("deferred_gradients", ("dim",)),
        (
            "deferred_gradients_configure",
            ("handle", "capacity", "max_rows", "max_age", "is_shadow"),
        ),
        ("deferred_gradients_flush", ("handle", "drops")),
        ("deferred_gradients_state", ("handle", "counts", "num_deferred", "capacity", "flushes")),
        ("add_deferred", ("handle", "keys", "gradients", "indices", "sums", "by_movement")),
        ("take_due", ("handle", "saturated", "keys", "may_wait", "due_keys", "due_sums", "defers")),
    ],
)
def test_every_argument_is_documented(op, arguments):
    doc = getattr(_loader.library(), "slipstream_" + op).__doc__
    for argument in arguments:
        assert f"{argument}: " in doc, argument
