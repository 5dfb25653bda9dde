"""All paths that defer gradients, behind one interface, for tests against the definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from definitions import LOWEST_KEY, DeferralDefinition, DeferralRule

from slipstream_tf import optimizers
from slipstream_tf.config import Table
from slipstream_tf.ops import exchange, features
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops import update_policy as policy_ops
from slipstream_tf.ops.deferred_gradients import DeferredGradients, DueSums
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.mask import KeySet
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import NativeStore, VariableStore

DIM = 3
KEYS = np.arange(-8, 9) * 2**58
"""The keys whose sums may wait."""
# A power of two, so that products with it are exact.
RATE = 0.25
SPECS = [FeatureSpec("f", "t")]
Due = tuple[np.ndarray, np.ndarray]


class DeferralPath:
    """One implementation of deferral. The methods of a path take and return NumPy arrays.

    Attributes:
        dim: number of values per row.
        keys: the keys of generated steps.
        plain_mode: mode of a policy under which the path defers nothing.
        sums_rows: whether a step may have multiple gradients of a key, in any order.
        is_exact: whether sums come back bit for bit whatever their values. Otherwise only sums of
            small multiples of 1 / 32 do, and sums of zeros do not come back.
        takes_non_finite: whether gradients may be infinite or NaN.
        flushes_at_once: whether a flush returns the sums; otherwise the next step does.
        keeps_sums: whether sums stay when a policy of another kind replaces theirs.
        has_one_budget: whether `max_rows` limits all sums together; otherwise each shard's.
        has_capacity: whether the buffers have a capacity apart from `max_rows`.
    """

    dim = DIM
    keys = KEYS
    plain_mode = "apply"
    sums_rows = True
    is_exact = True
    takes_non_finite = True
    flushes_at_once = False
    keeps_sums = False
    has_one_budget = True
    has_capacity = False
    policy, saturated = UpdatePolicy(), frozenset[int]()

    def definition(self) -> DeferralDefinition:
        """Returns the definition that this path must equal."""
        return DeferralDefinition(DIM, lowest_key=None)

    def rule(self, capacity: float) -> DeferralRule:
        """Returns the settings of the last `configure`, as the definition takes them."""
        policy = self.policy
        return DeferralRule(
            defers=policy.mode == "defer",
            by_movement=policy.trigger == "movement",
            limit=policy.movement / self.movement_of_one(),
            saturated=self.saturated,
            max_age=policy.max_age,
            max_rows=policy.max_rows,
            capacity=capacity,
        )

    def movement_of_one(self) -> float:
        """Returns how far a sum whose largest absolute value is 1 would move a row."""
        return RATE

    def configure(
        self, policy: UpdatePolicy, capacity: int, saturated: Collection[int] = ()
    ) -> Due | None:
        """Sets policy, capacity and saturated keys; returns sums that left because of that."""
        raise NotImplementedError

    def flush(self) -> Due | None:
        """Flushes all sums; returns them if `flushes_at_once`."""
        raise NotImplementedError

    def due(self, keys: np.ndarray, gradients: np.ndarray) -> Due:
        """Takes a step; returns the due keys, ascending, and their sums."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """Returns counts by names of `definitions.COUNTS`."""
        raise NotImplementedError

    def exported(self) -> dict[str, np.ndarray]:
        """Returns keys, ages and sums that are deferred, in any order, and other entries."""
        raise NotImplementedError

    def restarted(self) -> DeferralPath:
        """Returns a new path with the same settings and deferred sums."""
        raise NotImplementedError

    def deferred(self) -> dict[int, tuple[int, bytes]]:
        """Returns deferred sums as `DeferralDefinition.deferred` does."""
        found = self.exported()
        columns = found["keys"].tolist(), found["ages"].tolist(), found["sums"]
        return {key: (age, total.tobytes()) for key, age, total in zip(*columns, strict=True)}


class BufferPath(DeferralPath):
    """The ops of `ops.deferred_gradients`; the sums may wait as if SGD had a rate of 1."""

    keys = np.append(LOWEST_KEY, KEYS)
    plain_mode = "mask"
    sums_rows = False
    keeps_sums = True
    has_capacity = True

    def __init__(self, device: str = "CPU:0", dim: int = DIM):
        self.device, self.dim = device, dim
        self.buffer, self.flagged = DeferredGradients(dim, device), KeySet(device)

    def definition(self) -> DeferralDefinition:
        return DeferralDefinition(self.dim, LOWEST_KEY)

    def movement_of_one(self) -> float:
        return 1.0

    def configure(
        self, policy: UpdatePolicy, capacity: int, saturated: Collection[int] = ()
    ) -> None:
        self.policy, self.saturated = policy, frozenset(saturated)
        self.buffer.configure(policy, capacity)
        self.flagged.assign(np.array(sorted(saturated), np.int64))

    def flush(self) -> None:
        self.buffer.flush()

    def run(self, keys: tf.Tensor, gradients: tf.Tensor, movement: float) -> DueSums:
        """Runs both halves of a step, eagerly or in a graph."""
        added = self.buffer.add(keys, gradients)
        may_wait = tf.reduce_max(tf.abs(added.sums), axis=1) < movement
        return self.buffer.take_due(self.flagged, keys, added, may_wait)

    def step(self, keys: Any, gradients: np.ndarray | None = None) -> DueSums:
        """Takes a step; gradients are ones unless given."""
        keys = np.array(keys, np.int64)
        if gradients is None:
            gradients = np.ones((keys.size, self.dim), np.float32)
        with tf.device(self.device):
            return self.run(tf.constant(keys), tf.constant(gradients), self.policy.movement)

    def due(self, keys: np.ndarray, gradients: np.ndarray) -> Due:
        due = self.step(keys, gradients)
        assert self.device in due.keys.device and self.device in due.sums.device
        assert bool(due.defers) == (self.policy.mode == "defer") and not bool(due.is_shadow)
        return due.keys.numpy(), due.sums.numpy()

    def counts(self) -> dict[str, int]:
        return self.buffer.state().counts._asdict()

    def exported(self) -> dict[str, np.ndarray]:
        keys, ages, sums = self.buffer.export()
        # The oldest come first, then keys ascend.
        np.testing.assert_array_equal(np.lexsort((keys, -ages)), np.arange(keys.size))
        assert self.buffer.state().num_deferred == keys.size
        return {"keys": keys, "ages": ages, "sums": sums}

    def restarted(self) -> BufferPath:
        other = BufferPath(self.device, self.dim)
        capacity = self.buffer.state().nbytes // (16 + 4 * self.dim)
        other.configure(self.policy, capacity, self.saturated)
        other.buffer.replace(*self.exported().values())
        return other


class NativePath(DeferralPath):
    """A table of the native store under SGD: the due sums are read from how far rows move."""

    is_exact = False
    takes_non_finite = False
    flushes_at_once = True
    has_one_budget = False

    def __init__(self) -> None:
        self.store = NativeStore([Table("t", DIM)], optimizers.SGD(RATE))
        self.store.write_rows("t", KEYS, np.zeros((KEYS.size, DIM), np.float32))

    def _rows(self) -> np.ndarray:
        return self.store.gather("t", KEYS)[0].numpy()

    def _moved_since(self, before: np.ndarray) -> Due:
        sums = (before - self._rows()) / np.float32(RATE)
        moved = (sums != 0).any(axis=1)
        return KEYS[moved], sums[moved]

    def configure(
        self, policy: UpdatePolicy, capacity: int, saturated: Collection[int] = ()
    ) -> Due:
        self.policy, self.saturated = policy, frozenset(saturated)
        before = self._rows()
        self.store.set_update_policy("t", policy)
        keys = np.array(sorted(saturated), np.int64)
        self.store.set_row_flags("t", keys, np.full(keys.size, SATURATED))
        return self._moved_since(before)

    def flush(self) -> Due:
        before = self._rows()
        self.store.flush()
        return self._moved_since(before)

    def due(self, keys: np.ndarray, gradients: np.ndarray) -> Due:
        before = self._rows()
        _, plan = self.store.lookup(features.pack({"f": keys}, SPECS), training=True)
        self.store.apply_gradients(plan, [tf.constant(gradients)])
        return self._moved_since(before)

    def counts(self) -> dict[str, int]:
        return dataclasses.asdict(self.store.update_counts("t"))

    def exported(self) -> dict[str, np.ndarray]:
        return self.store.export_deferred("t")

    def restarted(self) -> NativePath:
        other = NativePath()
        other.configure(self.policy, 0, self.saturated)
        other.store.import_deferred("t", self.exported())
        return other


class ExchangePath(DeferralPath):
    """A native table whose due sums are sent to other ranks; see `ops.exchange`."""

    takes_non_finite = False
    flushes_at_once = True
    has_one_budget = False
    _layout = table_ops.LookupLayout((0,), ("sum",), (DIM,), False)

    def __init__(self) -> None:
        self.handle = table_ops.create(Table("t", DIM), optimizers.SGD(RATE))
        table_ops.write(self.handle, KEYS, np.zeros((KEYS.size, DIM), np.float32))

    def configure(
        self, policy: UpdatePolicy, capacity: int, saturated: Collection[int] = ()
    ) -> Due:
        # A policy of another kind is refused while sums are deferred.
        due = self._due_of(None) if policy.keeps_sums_of(self.policy) else self.flush()
        self.policy, self.saturated = policy, frozenset(saturated)
        policy_ops.set_policy(self.handle, dataclasses.replace(policy, is_exchanged=True))
        keys = np.array(sorted(saturated), np.int64)
        policy_ops.set_row_flags(self.handle, keys, np.full(keys.size, SATURATED))
        return due

    @staticmethod
    def _due_of(rows: exchange.SendBuffer | None) -> Due:
        if rows is None:
            return np.empty(0, np.int64), np.empty((0, DIM), np.float32)
        keys, sums = rows.keys.numpy(), rows.values.numpy().reshape(-1, DIM)
        order = np.argsort(keys)
        return keys[order], sums[order]

    def flush(self) -> Due:
        return self._due_of(exchange.collect_deferred([self.handle]))

    def due(self, keys: np.ndarray, gradients: np.ndarray) -> Due:
        packed = features.pack({"f": keys}, SPECS)
        _, plan = table_ops.lookup([self.handle], packed, self._layout)
        rows = exchange.collect_gradients(plan, [tf.constant(gradients)], RATE)
        exchange.apply_rows([self.handle], rows, RATE)
        return self._due_of(rows)

    def counts(self) -> dict[str, int]:
        return dataclasses.asdict(policy_ops.update_counts(self.handle))

    def exported(self) -> dict[str, np.ndarray]:
        return table_ops.export_deferred(self.handle)

    def restarted(self) -> ExchangePath:
        other = ExchangePath()
        other.configure(self.policy, 0, self.saturated)
        table_ops.import_deferred(other.handle, self.exported())
        return other


class VariablePath(DeferralPath):
    """The store of a user's variable, whose row i has key `KEYS[i]`."""

    def __init__(self) -> None:
        variable = tf.Variable(tf.zeros([KEYS.size, DIM]))
        self.store = VariableStore({"t": variable}, keras.optimizers.SGD(RATE))

    def configure(
        self, policy: UpdatePolicy, capacity: int, saturated: Collection[int] = ()
    ) -> None:
        self.policy, self.saturated = policy, frozenset(saturated)
        self.store.set_update_policy("t", policy)
        rows = np.searchsorted(KEYS, np.array(sorted(saturated), np.int64))
        self.store.set_row_flags("t", rows, np.full(rows.size, SATURATED))

    def flush(self) -> None:
        self.store.flush_with_next_step("t")

    def due(self, keys: np.ndarray, gradients: np.ndarray) -> Due:
        rows = tf.constant(np.searchsorted(KEYS, keys), tf.int64)
        shape = tf.constant([KEYS.size, DIM], tf.int64)
        slices = tf.IndexedSlices(tf.constant(gradients), rows, shape)
        passed = self.store.filter_gradient("t", slices)
        return KEYS[passed.indices.numpy()], passed.values.numpy()

    def counts(self) -> dict[str, int]:
        return dataclasses.asdict(self.store.update_counts("t"))

    def exported(self) -> dict[str, np.ndarray]:
        found = self.store.export_deferred("t")
        return {**found, "keys": KEYS[found["keys"]]}

    def restarted(self) -> VariablePath:
        other = VariablePath()
        other.configure(self.policy, 0, self.saturated)
        other.store.import_deferred("t", self.store.export_deferred("t"))
        return other
