"""slipstream_tf.ops.deferred_gradients against a dictionary of sums."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops import _loader
from slipstream_tf.ops.deferred_gradients import AddedSums, DeferredCounts, DeferredGradients
from slipstream_tf.ops.mask import KeySet
from slipstream_tf.ops.update_policy import UpdatePolicy

needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU") or not _loader.build_info().cuda,
    reason="needs a GPU and a library built with CUDA",
)
DEVICES = ["CPU:0", pytest.param("GPU:0", marks=needs_gpu)]
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
DIM = 3
INTERVAL = UpdatePolicy("defer", "interval", max_age=4, max_rows=6)
MOVEMENT = UpdatePolicy("defer", "movement", movement=1.0, max_age=4, max_rows=6)
BAD = (ValueError, tf.errors.InvalidArgumentError)


class Reference:
    """The definition: sums by key, each with the step that it began in."""

    def __init__(self):
        self.sums: dict[int, np.ndarray] = {}
        self.since: dict[int, int] = {}
        self.steps, self.flushes = 0, False
        self.counts = dict.fromkeys(DeferredCounts._fields, 0)

    def step(self, policy, capacity, flagged, keys, gradients):
        """Returns the rows that leave: keys, ascending, and sums."""
        self.steps += 1
        may_hold = policy.mode == "defer" and not self.flushes
        by_movement = policy.trigger == "movement"
        leaving, wants_room = {}, []
        for key, gradient in zip(keys, gradients, strict=True):
            is_deferred = key in self.sums
            total = gradient + self.sums.get(key, np.float32(0))
            is_old = is_deferred and self.steps - self.since[key] >= policy.max_age
            waits = np.abs(total).max() < policy.movement if by_movement else key in flagged
            waits = waits and may_hold and not is_old and np.isfinite(total).all()
            if not waits or key == LOWEST:
                leaving[key] = total
                self.counts["due_by_age"] += is_old
                self.counts["due_by_movement"] += by_movement and may_hold and not is_old
                self._drop(key)
            elif is_deferred:
                self.sums[key] = total
                self.counts["deferred"] += 1
            else:
                wants_room.append((key, total))
        for key in list(self.sums):
            if self.flushes or self.steps - self.since[key] >= policy.max_age:
                leaving[key] = self.sums[key]
                self._drop(key)
                self.counts["flushed" if self.flushes else "due_by_age"] += 1
                self.counts["without_gradient"] += 1
        for key, total in wants_room:
            has_room = len(self.sums) < min(capacity, policy.max_rows)
            self.counts["deferred" if has_room else "over_budget"] += 1
            if has_room:
                self.sums[key], self.since[key] = total, self.steps
            else:
                leaving[key] = total
        self.flushes = False
        order = sorted(leaving)
        return order, np.array([leaving[key] for key in order], np.float32).reshape(-1, DIM)

    def _drop(self, key):
        self.sums.pop(key, None)
        self.since.pop(key, None)


class Holder:
    """A buffer, and a judgement of its sums."""

    def __init__(self, device: str = "CPU:0"):
        self.device, self.buffer, self.flagged = (
            device,
            DeferredGradients(DIM, device),
            KeySet(device),
        )
        self.policy, self.capacity = UpdatePolicy(), 0

    def configure(self, policy, capacity, flagged=()):
        self.policy, self.capacity = policy, capacity
        self.buffer.configure(policy, capacity)
        self.flagged.assign(np.array(sorted(flagged), np.int64))

    def run(self, keys, gradients, movement):
        added = self.buffer.add(keys, gradients)
        may_wait = tf.reduce_max(tf.abs(added.sums), axis=1) < movement
        return self.buffer.take_due(self.flagged, keys, added, may_wait)

    def step(self, keys, gradients=None):
        keys = np.array(keys, np.int64)
        if gradients is None:
            gradients = np.ones((keys.size, DIM), np.float32)
        with tf.device(self.device):
            return self.run(tf.constant(keys), tf.constant(gradients), self.policy.movement)


def some_rows(rng, n):
    keys = rng.choice(np.arange(-8, 9), min(n, 17), replace=False) * (2**58)
    gradients = rng.normal(scale=0.5, size=(keys.size, DIM)).astype(np.float32)
    gradients[rng.random(keys.size) < 0.05, 1] = np.nan
    return np.sort(keys), gradients


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_a_dictionary(device, seed):
    rng = np.random.default_rng(seed)
    holder, reference = Holder(device), Reference()
    for step in range(15):
        if step % 4 == 0:
            mode = "defer" if rng.random() < 0.8 else "mask"
            trigger = ("movement", "interval")[rng.integers(2)]
            ages, rows = rng.integers(1, 7), rng.integers(0, 12)
            policy = UpdatePolicy(mode, trigger, 0.8, max_age=int(ages), max_rows=int(rows))
            flagged = {int(key) for key in some_rows(rng, 12)[0]}
            capacity = int(rng.integers(0, 12))
            holder.configure(policy, capacity, flagged)
            capacity = max(capacity, len(reference.sums))
        if rng.random() < 0.15:
            holder.buffer.flush()
            reference.flushes = len(reference.sums) > 0
        keys, gradients = some_rows(rng, rng.integers(0, 14))
        assert holder.buffer.state().flushes == reference.flushes
        due = holder.step(keys, gradients)
        expected_keys, expected_sums = reference.step(policy, capacity, flagged, keys, gradients)
        assert due.keys.numpy().tolist() == expected_keys
        np.testing.assert_array_equal(due.sums, expected_sums)
        assert device in due.keys.device and device in due.sums.device
        assert bool(due.defers) == (policy.mode == "defer") and not bool(due.is_shadow)
        state = holder.buffer.state()
        assert state.num_deferred == len(reference.sums)
        assert state.counts._asdict() == reference.counts
        if rng.random() < 0.2:
            deferred = dict(
                zip(*[column.tolist() for column in holder.buffer.export()[:2]], strict=True)
            )
            assert deferred == {
                key: reference.steps - reference.since[key] for key in reference.sums
            }
            # Another buffer goes on from there.
            keys, ages, sums = holder.buffer.export()
            order = np.lexsort((keys, -ages))
            np.testing.assert_array_equal(order, np.arange(keys.size))
            np.testing.assert_array_equal(
                sums, np.reshape([reference.sums[key] for key in keys.tolist()], (-1, DIM))
            )
            went_on = Holder(device)
            went_on.configure(policy, capacity, flagged)
            went_on.buffer.replace(keys, ages, sums)
            if state.flushes:
                went_on.buffer.flush()
            capacity = max(capacity, len(keys))
            reference.counts = dict.fromkeys(DeferredCounts._fields, 0)
            holder = went_on


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("keys", "ages", "shape", "why"),
    [
        ([1, 2, 1], [0, 0, 0], (3, DIM), "key 1 comes twice"),
        ([LOWEST], [0], (1, DIM), "cannot be deferred"),
        ([7], [-1], (1, DIM), "age of deferred gradient 0, key 7, is -1"),
        ([7, 8], [1], (2, DIM), "."),
        ([7], [1], (1, DIM + 1), "."),
    ],
)
def test_what_cannot_be_deferred_raises(device, keys, ages, shape, why):
    holder = Holder(device)
    holder.configure(INTERVAL, 2, [5])
    holder.step([5])
    with pytest.raises(BAD, match=why):
        holder.buffer.replace(np.array(keys), np.array(ages), np.ones(shape, np.float32))
    kept = holder.buffer.export()
    assert kept[0].tolist() == [5] and kept[1].tolist() == [0]
    holder.buffer.replace(np.empty(0), np.empty(0), np.empty((0, DIM)))
    assert holder.buffer.state().num_deferred == 0


@pytest.mark.parametrize("device", DEVICES)
def test_many_rows(device):
    rng = np.random.default_rng(0)
    holder, reference = Holder(device), Reference()
    policy = dataclasses.replace(MOVEMENT, max_rows=3000)
    holder.configure(policy, 3000)
    for _ in range(8):
        keys = np.unique(rng.zipf(1.2, 9000))
        gradients = rng.normal(scale=0.4, size=(keys.size, DIM)).astype(np.float32)
        due = holder.step(keys, gradients)
        expected_keys, expected_sums = reference.step(policy, 3000, (), keys.tolist(), gradients)
        np.testing.assert_array_equal(due.keys, expected_keys)
        np.testing.assert_array_equal(due.sums, expected_sums)
    assert holder.buffer.state().counts._asdict() == reference.counts
    assert reference.counts["deferred"] > 0 and reference.counts["over_budget"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_empty_steps_and_no_room(device):
    holder = Holder(device)
    assert holder.step([]).sums.shape == (0, DIM), "before it is configured"
    assert holder.step([4]).keys.numpy().tolist() == [4]
    holder.configure(INTERVAL, 0, {4})
    assert holder.step([4]).keys.numpy().tolist() == [4], "there is no room"
    holder.configure(INTERVAL, 2, {4})
    assert holder.step([4]).keys.shape == (0,)
    assert [holder.step([]).keys.numpy().tolist() for _ in range(4)] == [[], [], [], [4]]
    assert holder.buffer.state().num_deferred == 0


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_deferred_stays_when_room_changes(device):
    holder = Holder(device)
    holder.configure(INTERVAL, 5, {1, 2, 3, 4})
    assert holder.step([1, 2, 3, 4]).keys.shape == (0,)
    for capacity, expected in ((3, 4), (40, 40), (0, 4)):
        holder.configure(INTERVAL, capacity, {1, 3, 4})
        assert holder.buffer.state().nbytes == expected * (16 + 4 * DIM)
        assert holder.buffer.state().num_deferred == 4
    due = holder.step([2, 3])
    assert due.keys.numpy().tolist() == [2] and due.sums.numpy()[0, 0] == 2.0
    holder.buffer.flush()
    due = holder.step([])
    assert due.keys.numpy().tolist() == [1, 3, 4]
    np.testing.assert_array_equal(due.sums[:, 0], [1.0, 2.0, 1.0])
    holder.configure(UpdatePolicy(), 0)
    assert holder.buffer.state().nbytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_sums_that_replace_those_on_their_way_out_stay(device):
    holder = Holder(device)
    holder.configure(INTERVAL, 4, {1, 2})
    holder.step([1])
    holder.buffer.flush()
    holder.buffer.replace(np.array([2]), np.array([0]), np.ones((1, DIM), np.float32))
    assert not holder.buffer.state().flushes
    assert holder.step([]).keys.shape == (0,)
    assert holder.buffer.state().num_deferred == 1


@pytest.mark.parametrize("device", DEVICES)
def test_shadow_mode_is_said_and_its_sums_can_be_dropped(device):
    holder = Holder(device)
    shadow = dataclasses.replace(INTERVAL, is_shadow=True)
    holder.configure(shadow, 6, {1, 2})
    assert bool(holder.step([1, 2, 3]).is_shadow)
    holder.buffer.flush(drops=True)
    state = holder.buffer.state()
    assert (state.num_deferred, state.counts.flushed, state.counts.without_gradient) == (0, 2, 2)
    assert not state.flushes and state.nbytes > 0
    assert holder.step([1]).keys.shape == (0,), "its sum begins anew"
    holder.buffer.flush()
    holder.buffer.flush(drops=True)
    assert holder.buffer.state().flushes, "they are on their way out"
    due = holder.step([])
    assert not bool(due.is_shadow) and due.keys.numpy().tolist() == [1]


def test_the_rule_is_read_at_run_time_without_retracing():
    holder, traces = Holder(), []

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)]
    )
    def step(keys, gradients):
        traces.append(1)
        due = holder.run(keys, gradients, 10.0)
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
        holder.configure(policy, 4, flagged)
        keys, is_shadow, defers = step(*one)
        assert (keys.numpy().tolist(), bool(is_shadow), bool(defers)) == expected
    assert len(traces) == 1


def test_shapes_of_unknown_gradients():
    holder = Holder()

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64), tf.TensorSpec(None, tf.float32)])
    def step(keys, gradients):
        added = holder.buffer.add(keys, gradients)
        assert added.indices.shape.rank == 1 and added.sums.shape.rank == 2
        due = holder.buffer.take_due(holder.flagged, keys, added, tf.zeros_like(keys, tf.bool))
        assert due.sums.shape.as_list() == [None, DIM]
        return due.keys

    assert step(tf.constant([2], tf.int64), tf.ones([1, DIM])).numpy().tolist() == [2]


def test_all_keys_but_the_lowest_can_be_deferred():
    holder = Holder()
    holder.configure(INTERVAL, 6, {LOWEST, LOWEST + 1, HIGHEST})
    assert holder.step([LOWEST, LOWEST + 1, HIGHEST]).keys.numpy().tolist() == [LOWEST]
    assert holder.buffer.state().num_deferred == 2


@pytest.mark.parametrize(
    ("keys", "shape"),
    [([[1]], [1, DIM]), ([1, 2], [1, DIM]), ([1], [1, DIM + 1]), ([1], [DIM]), (1, [1, DIM])],
)
def test_bad_shapes_of_gradients(keys, shape):
    with pytest.raises(BAD, match=r"allowed|rank|Dimension"):
        Holder().buffer.add(tf.constant(keys, tf.int64), tf.ones(shape))


@pytest.mark.parametrize(
    "change",
    [
        {"indices": [-1]},
        {"indices": [[-1, -1]]},
        {"sums": [[1.0] * DIM]},
        {"sums": [[1.0] * (DIM + 1)] * 2},
        {"may_wait": [True]},
        {"may_wait": True},
        {"indices": [-1, 0]},
        {"indices": [-1, 1]},
        {"indices": [-2, -1]},
        {"indices": [-1, 4]},
    ],
)
def test_what_the_second_half_refuses_changes_nothing(change):
    holder = Holder()
    holder.configure(INTERVAL, 4, {5, 6})
    holder.step([5])
    keys = tf.constant([5, 6], tf.int64)
    added = holder.buffer.add(keys, tf.ones([2, DIM]))
    assert added.indices.numpy().tolist() == [0, -1] and not bool(added.by_movement)
    may_wait = tf.constant(change.pop("may_wait", [True, True]))
    types = {"indices": tf.int64, "sums": tf.float32}
    changed = {name: tf.constant(value, types[name]) for name, value in change.items()}
    with pytest.raises(BAD, match=r"allowed|rank|Dimension|Shapes"):
        holder.buffer.take_due(holder.flagged, keys, added._replace(**changed), may_wait)
    assert holder.buffer.state().counts.deferred == 1
    due = holder.buffer.take_due(holder.flagged, keys, added, tf.constant([True, True]))
    assert due.keys.shape == (0,) and holder.buffer.state().num_deferred == 2


def test_a_key_that_is_given_twice_is_refused():
    with pytest.raises(BAD, match=r"keys\[0\] and keys\[2\] are both 3"):
        Holder().step([3, 4, 3])


@pytest.mark.parametrize(
    ("name", "value"), [("capacity", -1), ("max_rows", -1), ("max_age", 0), ("capacity", [1])]
)
def test_bad_settings(name, value):
    numbers = {"capacity": 1, "max_rows": 1, "max_age": 1, name: value}
    tensors = {key: tf.constant(number, tf.int64) for key, number in numbers.items()}
    buffer = DeferredGradients(DIM)
    with pytest.raises(BAD, match=rf"{name}.*allowed|rank"):
        _loader.library().slipstream_deferred_gradients_configure(
            handle=buffer.handle, **tensors, defers=True, by_movement=True
        )
    assert buffer.state().nbytes == 0


def test_more_than_there_is_memory_for_is_refused():
    holder = Holder()
    holder.configure(INTERVAL, 2, {1})
    holder.step([1])
    for capacity in (2**62, 2**44):
        with pytest.raises(tf.errors.OpError):
            holder.buffer.configure(INTERVAL, capacity)
    assert holder.buffer.state().num_deferred == 1
    assert holder.step([1]).keys.shape == (0,)


@pytest.mark.parametrize("dim", [-1, 0, 65537, 2**63 - 1])
def test_bad_dim(dim):
    with pytest.raises(BAD, match=f"dim of deferred gradients is {dim}; allowed: 1 to 65536"):
        DeferredGradients(dim)


def test_the_largest_dim():
    buffer = DeferredGradients(65536)
    added = buffer.add(tf.constant([1], tf.int64), tf.ones([1, 65536]))
    assert added.sums.shape == (1, 65536)


def test_handle_of_something_else():
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


def test_resource_dies_with_its_last_handle():
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
