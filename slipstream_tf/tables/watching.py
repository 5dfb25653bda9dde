"""Base of stores that watch variables updated by an external optimizer.

The gradients of a table pass through the store on their way to the optimizer. The store returns the
gradients to apply now. Masked gradients are dropped. Deferred gradients are summed in a buffer of
bounded size and returned in a later step. Everything runs on the table's device, eagerly or in a
`tf.function`. See `VariableStore` and `SokStore`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.ops.deferred_gradients import DeferredGradients
from slipstream_tf.ops.mask import KeySet, mask_gradients
from slipstream_tf.ops.update_policy import SATURATED, UpdateCounts, UpdatePolicy
from slipstream_tf.tables.base import UpdatedElsewhere

# Maps keys, int64 [n], and sums, float32 [n, dim], to distances, float32 [n]: how far each sum
# would move its row.
MovementFunction = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer inside SOK's wrapper, or the optimizer itself."""
    return getattr(optimizer, "_optimizer", optimizer)


class Movements:
    """Computes how far an optimizer would move rows.

    Subclasses support the optimizers of one library.

    Attributes:
        known: Names of the supported optimizers, for error messages.
    """

    known: str
    # With these settings, a step does not depend only on one gradient and the state of its row.
    _excluded_settings: tuple[str, ...]

    def unknown(self, optimizer: Any) -> str | None:
        """Returns a description of an unsupported optimizer, or None if supported.

        Args:
            optimizer: The optimizer, or None if there is none.
        """
        if optimizer is None:
            return "no optimizer"
        inner = inner_of(optimizer)
        name = type(inner).__name__
        if self.rule(optimizer) is None:
            return name
        for setting in self._excluded_settings:
            if getattr(inner, setting, None):
                return f"{name} with {setting.lstrip('_')}"
        return None

    def learning_rate(self, optimizer: Any) -> tf.Tensor:
        """Returns the current learning rate of a supported optimizer, a scalar."""
        raise NotImplementedError

    def rule(self, optimizer: Any) -> str | None:
        """Returns "SGD" or "Adagrad", or None for any other update rule."""
        raise NotImplementedError

    def _by_adagrad(
        self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor
    ) -> tf.Tensor:
        """Returns each row's largest change by Adagrad, float32 [n].

        The learning rate is not applied. The arguments are those of `of`.
        """
        raise NotImplementedError

    def of(self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        """Returns the maximum distance that each sum moves its row, float32 [n].

        The distance is the largest absolute change of a value. Weight decay is not included, and
        clipping may make the real distance smaller.

        Args:
            optimizer: A supported optimizer.
            variable: The variable that it updates.
            keys: int64 [n], row indices of the variable.
            sums: float32 [n, dim], summed gradients.

        Raises:
            ValueError: The optimizer has no state for the variable yet.
        """
        if self.rule(optimizer) == "SGD":
            maximum = tf.reduce_max(tf.abs(sums), axis=1)
        else:
            maximum = self._by_adagrad(optimizer, variable, keys, sums)
        return self.learning_rate(optimizer) * maximum


class KerasMovements(Movements):
    """Movements of Keras 3 optimizers, with or without `distributed.DistributedOptimizer`."""

    known = "keras.optimizers.SGD without momentum, or keras.optimizers.Adagrad"
    _excluded_settings = ("momentum", "gradient_accumulation_steps", "loss_scale_factor")

    def learning_rate(self, optimizer: Any) -> tf.Tensor:
        return tf.cast(optimizer.learning_rate, tf.float32)

    def rule(self, optimizer: Any) -> str | None:
        """Returns "SGD" or "Adagrad", or None for any other update rule.

        A subclass of a Keras optimizer may override `update_step`, so the class that defines
        the method decides.
        """
        for base in type(optimizer).__mro__:
            if "update_step" in vars(base):
                is_known = base.__name__ in ("SGD", "Adagrad")
                is_keras = base.__module__.split(".")[0] == "keras"
                return base.__name__ if is_keras and is_known else None
        return None

    def _by_adagrad(
        self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor
    ) -> tf.Tensor:
        if not optimizer.built:
            raise ValueError(
                f"The optimizer {type(optimizer).__name__} of a VariableStore is not built, but "
                "Movement needs its state to compute how far a gradient would move a row. Call "
                "optimizer.build(model.trainable_variables) before the first step."
            )
        accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)]
        accumulated = tf.gather(getattr(accumulator, "value", accumulator), keys)
        squares = tf.square(sums)
        denominators = accumulated + squares + optimizer.epsilon
        return tf.sqrt(tf.reduce_max(squares / denominators, axis=1))


def added_up(
    keys: np.ndarray, ages: np.ndarray, sums: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums deferred gradients per key.

    Args:
        keys: int64 [..., n]. Each column is a key.
        ages: int64 [n].
        sums: float32 [n, dim].

    Returns:
        The distinct keys in ascending order [..., m], the largest age of each key, int64 [m], and
        the total of its sums, float32 [m, dim].
    """
    merged, index = np.unique(keys, axis=-1, return_inverse=True)
    total = np.zeros((merged.shape[-1], sums.shape[1]), np.float32)
    np.add.at(total, index.ravel(), sums)
    oldest = np.zeros(merged.shape[-1], np.int64)
    np.maximum.at(oldest, index.ravel(), ages)
    return merged, oldest, total


class WatchedGradients:
    """The policy, saturated rows and deferred gradients of one table.

    Buffers for deferred gradients are allocated only while a policy defers or sums remain. An entry
    has a sum, its key and the step in which the sum was started. Note: every step scans the keys
    and ages of all entries, so a step takes longer with a larger buffer.

    Attributes:
        policy: The current policy.
        saturated: int64 [n], the saturated keys. The code that sets row flags replaces it.
        masked: The set of row indices with masked gradients.
        buffer: The deferred gradients.
        is_active: Scalar bool variable: whether gradients may be, or were, deferred.
        offered_rows: int64 scalar variable: the number of gradient rows before masking, one per key
            and step.
        masked_rows: int64 scalar variable: the number of masked gradient rows.
    """

    def __init__(self, name: str, dim: int, device: str):
        """Starts without masked rows and without deferred gradients.

        Args:
            name: Name of the table.
            dim: Number of values per row.
            device: Device of the table.
        """
        self.policy, self.saturated = UpdatePolicy("mask"), np.empty(0, np.int64)
        self.masked, self._nothing, self._by_interval = (KeySet(device) for _ in range(3))
        self.buffer = DeferredGradients(dim, device)
        with tf.device("CPU:0"):
            self._only_counts = tf.Variable(False, trainable=False)
            self.is_active = tf.Variable(False, trainable=False)
            self._movement = tf.Variable(0.0, trainable=False)
            self.offered_rows, self.masked_rows = (
                tf.Variable(0, trainable=False, dtype=tf.int64, name=f"{name}_{kind}_rows")
                for kind in ("offered", "masked")
            )

    @property
    def masks(self) -> bool:
        """Whether gradients of saturated rows are dropped."""
        return self.policy.mode == "mask" and not self.policy.is_shadow

    def num_unapplied(self) -> int:
        """Returns the number of deferred gradients to apply (eager only)."""
        state = self.buffer.state()
        is_shadow = self.policy.is_shadow and not state.flushes
        return state.num_deferred if self.is_active.numpy() and not is_shadow else 0

    def configure(self, policy: UpdatePolicy, rows: np.ndarray, maximum: int) -> None:
        """Sets the policy.

        Gradients that were deferred under an incompatible policy are returned in the next step, or
        dropped if that policy was a dry run.

        Args:
            policy: A policy of any mode. Only mode "defer" defers gradients.
            rows: int64 [n], the indices of the saturated rows in the gradients.
            maximum: Maximum number of deferred sums, whatever the policy allows.
        """
        before, self.policy = self.policy, policy
        if not policy.keeps_sums_of(before):
            self.buffer.flush(drops=before.is_shadow)
        is_mask, defers = policy.mode == "mask", policy.mode == "defer"
        self._only_counts.assign(policy.is_shadow and is_mask)
        self.masked.assign(rows if is_mask else rows[:0])
        limited = dataclasses.replace(policy, max_rows=min(policy.max_rows, maximum))
        self.buffer.configure(limited, limited.max_rows if defers else 0)
        self._by_interval.assign(rows if defers and policy.trigger == "interval" else rows[:0])
        self._movement.assign(policy.movement)
        # Stays active until the next step even if this rank has no sums, because all ranks must
        # take the same branch.
        self.is_active.assign(defers or bool(self.is_active))

    def flush(self) -> None:
        """Schedules all sums for the next step, or drops dry-run sums."""
        self.buffer.flush(drops=self.policy.is_shadow)

    def take(self, gradients: tf.IndexedSlices, movement: MovementFunction) -> tf.IndexedSlices:
        """Sums gradient rows per key and returns the gradients to apply now.

        Args:
            gradients: Gradients of the table's variable, values float32 [n, dim].
            movement: Returns how far each sum would move its row.

        Returns:
            Slices with distinct ascending indices and the same `dense_shape`.
        """
        result = mask_gradients(gradients, self.masked)
        with tf.device("CPU:0"):
            self.offered_rows.assign_add(result.offered)
            self.masked_rows.assign_add(result.masked)
        # Conditions are tensors, so that the policy can change without retracing.
        passed = tf.cond(
            self._only_counts,
            lambda: _parts(mask_gradients(gradients, self._nothing).slices),
            lambda: _parts(result.slices),
        )
        indices, values = tf.cond(
            self.is_active, lambda: self._defer(passed[0], passed[1], movement), lambda: passed
        )
        return tf.IndexedSlices(values, indices, gradients.dense_shape)

    def _defer(
        self, indices: tf.Tensor, values: tf.Tensor, movement: MovementFunction
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds a step's gradients to the sums and returns the due sums.

        In a dry run the given gradients are returned unchanged.
        """
        keys = tf.cast(indices, tf.int64)
        added = self.buffer.add(keys, values)
        may_wait = tf.cond(
            added.by_movement,
            lambda: movement(keys, added.sums) < self._movement,
            lambda: tf.zeros_like(keys, tf.bool),
        )
        due = self.buffer.take_due(self._by_interval, keys, added, may_wait)
        # If the data ends within a step, ops that do not depend on the gradients still run. State
        # must therefore change only after ops that depend on them.
        self.is_active.assign(due.defers)
        return tf.cond(
            due.is_shadow,
            lambda: (indices, values),
            lambda: (tf.cast(due.keys, indices.dtype), due.sums),
        )

    def counts(self) -> UpdateCounts:
        """Returns the counts of gradient rows.

        In a dry run, they count the rows that would have been masked or deferred.
        """
        offered, masked, state = int(self.offered_rows), int(self.masked_rows), self.buffer.state()
        deferred = state.counts._asdict()
        added = deferred.pop("without_gradient") - deferred["deferred"]
        now = {"deferred_now": state.num_deferred, "deferred_bytes": state.nbytes}
        return UpdateCounts(offered, offered - masked + added, masked, **deferred, **now)


def _parts(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return slices.indices, slices.values


class WatchingStore(UpdatedElsewhere):
    """Base of stores that watch rows updated by the user's optimizer."""

    flushes_with_next_step = True
    _movements: Movements
    _updater: Any  # The optimizer of the rows; None if the store does not know it.
    _watched: Mapping[str, WatchedGradients]

    def _variable(self, table: str) -> Any:
        """Returns the variable of a table that the optimizer updates."""
        raise NotImplementedError

    def _rows_of(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns the row indices of keys in this rank's gradients, int64 [n]."""
        return keys

    def _keys_of(self, table: str, rows: np.ndarray) -> np.ndarray:
        """Returns the keys of row indices; the inverse of `_rows_of`."""
        return rows

    def _is_own(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns whether this rank stores the rows of keys, bool [n]."""
        return np.ones(keys.shape, bool)

    def filter_gradient(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums gradients per key, then masks or defers them by the policy.

        Args:
            table: Name of the table.
            gradients: Gradients of the table's variable, values float32 [n, dim], in the scale in
                which they will be applied.

        Returns:
            The gradients to apply now, including deferred gradients that are due: slices with
                distinct ascending indices and the same `dense_shape`.

        Raises:
            ValueError: There is no such table, or the optimizer has no state yet.
            TypeError: The gradients are not sparse.
            tf.errors.InvalidArgumentError: An index is out of range (only on a CPU).
        """
        movement = functools.partial(self._movement, self._require(table))
        return self._watched[table].take(gradients, movement)

    def _movement(self, table: str, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        if self._movements.unknown(self._updater) is not None:
            # No policy takes this branch, but a traced graph contains it.
            return tf.fill(tf.shape(keys), np.float32(np.inf))
        return self._movements.of(self._updater, self._variable(table), keys, sums)

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """Replaces a table's saturated keys; see `TrackedStore.set_row_flags`."""
        flags, keys = np.asarray(flags, np.uint8), np.asarray(keys, np.int64)
        saturated, watched = keys[(flags & SATURATED) > 0], self._watched[self._require(table)]
        watched.saturated = saturated[self._is_own(table, saturated)]
        self._configure(table, watched.policy)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Sets the policy for a table's gradients, from the next step.

        Gradients that were deferred under an incompatible policy are applied with the next step.

        Args:
            table: Name of the table.
            policy: The policy. The buffers that it needs are allocated here, for at most `max_rows`
                sums. A store can have a lower maximum, such as the number of rows of the table.

        Raises:
            ValueError: The policy defers by movement, but movement is not defined for the
                optimizer. Or the policy decays moments or simulates ranks, which requires an
                optimizer of the store.
        """
        self._require_movement(self._require(table), policy, self._updater)
        self._require_policy(table, policy)
        self._configure(table, policy)

    def _require_movement(self, table: str, policy: UpdatePolicy, optimizer: Any) -> None:
        """Raises ValueError if deferring by movement does not support the optimizer."""
        raise NotImplementedError

    def _max_deferred(self, table: str) -> int:
        """Returns the maximum number of deferred rows, whatever the policy allows."""
        return self.size(table)

    def _configure(self, table: str, policy: UpdatePolicy) -> None:
        watched = self._watched[table]
        rows = self._rows_of(table, watched.saturated)
        watched.configure(policy, rows, self._max_deferred(table))

    def policy_of(self, table: str) -> UpdatePolicy:
        return self._watched[self._require(table)].policy

    def update_counts(self, table: str) -> UpdateCounts:
        """Returns a table's counts of gradient rows.

        In a dry run, they count the rows that would have been masked or deferred.
        """
        return self._watched[self._require(table)].counts()

    def _known_rate(self) -> Any:
        """Returns the optimizer's learning rate, a scalar; 0 if unknown."""
        raise NotImplementedError

    def export_deferred(self, table: str) -> dict[str, np.ndarray]:
        """Returns the deferred gradients of this rank's rows, and keeps them.

        Returns:
            The arrays that `ops.table` describes. "learning_rate" is the optimizer's rate, or 0 if
            unknown. In addition "is_leaving", a bool: whether all sums are applied with the next
            step.
        """
        buffer = self._watched[self._require(table)].buffer
        rows, ages, sums = buffer.export()
        return {
            "keys": self._keys_of(table, rows),
            "ages": ages,
            "ranks": np.zeros(rows.size, np.int32),
            "sums": sums,
            "learning_rate": np.float32(self._known_rate()),
            "is_leaving": np.bool_(buffer.state().flushes),
        }

    def import_deferred(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the deferred gradients; sums of the same key are added up.

        Args:
            table: Name of the table.
            contents: Result of `export_deferred`. Keys that other ranks own are ignored.

        Raises:
            RuntimeError: There are deferred gradients, but the policy does not defer.
        """
        watched = self._watched[self._require(table)]
        is_own = self._is_own(table, np.asarray(contents["keys"]))
        keys, ages, sums = (contents[name][is_own] for name in ("keys", "ages", "sums"))
        if keys.size and watched.policy.mode != "defer":
            raise RuntimeError(
                f"Cannot import {keys.size} deferred gradients of table {table!r}, because its "
                "update policy does not defer. Set a policy that defers gradients first."
            )
        watched.buffer.replace(*added_up(self._rows_of(table, keys), ages, sums))

    def flush_with_next_step(self, table: str) -> None:
        self._watched[self._require(table)].buffer.flush()
