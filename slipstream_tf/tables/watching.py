"""Stores that watch tables of the user's: gradients are masked or deferred before the optimizer.

In: a table's gradients on their way to an optimizer that is not the store's. Out: those that are to
be applied now; the others are thrown away, or summed in a buffer of as many rows as the budget
allows, and leave with the gradients of a later step. Eager or in a `tf.function`, on the table's
device. See `VariableStore` and `SokStore`.
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

# Of keys int64 [n] and sums float32 [n, dim]: float32 [n], how far each sum would move its row.
Movement = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer that SOK's wrapper has; others are their own."""
    return getattr(optimizer, "_optimizer", optimizer)


class Movements:
    """The optimizers of one kind, and what is known of their steps.

    Attributes:
        known: the optimizers whose movement is known, for errors.
    """

    known: str
    # With these, the step does not follow from one gradient and the state of its row.
    _excluded_settings: tuple[str, ...]

    def unknown(self, optimizer: Any) -> str | None:
        """Returns what an optimizer is, if the movement under it is not known, else None.

        Args:
            optimizer: None: there is none.
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
        """Returns the rate, a scalar, by which one of the `known` moves rows now."""
        raise NotImplementedError

    def rule(self, optimizer: Any) -> str | None:
        """Returns "SGD" or "Adagrad", or None for an optimizer that has neither's step."""
        raise NotImplementedError

    def _by_adagrad(
        self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor
    ) -> tf.Tensor:
        """The largest of a row's steps under Adagrad, float32 [n], by a learning rate of 1."""
        raise NotImplementedError

    def of(self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        """Returns float32 [n]: how far applying each sum would move a value of its row at most.

        Weight decay moves rows besides, and clipping may leave them closer.

        Args:
            optimizer: one of the `known`.
            variable: that it updates.
            keys: int64 [n], rows of the variable.
            sums: float32 [n, dim], summed gradients.

        Raises:
            ValueError: the optimizer has no state for the variable yet.
        """
        if self.rule(optimizer) == "SGD":
            most = tf.reduce_max(tf.abs(sums), axis=1)
        else:
            most = self._by_adagrad(optimizer, variable, keys, sums)
        return self.learning_rate(optimizer) * most


class KerasMovements(Movements):
    """Optimizers of Keras 3, wrapped by `distributed.DistributedOptimizer` or not."""

    known = "keras.optimizers.SGD without momentum, or keras.optimizers.Adagrad"
    _excluded_settings = ("momentum", "gradient_accumulation_steps", "loss_scale_factor")

    def learning_rate(self, optimizer: Any) -> tf.Tensor:
        """See `Movements.learning_rate`."""
        return tf.cast(optimizer.learning_rate, tf.float32)

    def rule(self, optimizer: Any) -> str | None:
        """See `Movements.rule`; a subclass of Keras's optimizers may have a step of its own."""
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
                f"The optimizer {type(optimizer).__name__} of a VariableStore has no state yet, so "
                "that nobody knows how far it would move a row. Call "
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
    """Adds up the sums of each key.

    Args:
        keys: int64 [..., n]; a column is a key.
        ages: int64 [n].
        sums: float32 [n, dim].

    Returns:
        The different keys, ascending; of each, the largest age and the total.
    """
    merged, index = np.unique(keys, axis=-1, return_inverse=True)
    total = np.zeros((merged.shape[-1], sums.shape[1]), np.float32)
    np.add.at(total, index.ravel(), sums)
    oldest = np.zeros(merged.shape[-1], np.int64)
    np.maximum.at(oldest, index.ravel(), ages)
    return merged, oldest, total


class WatchedGradients:
    """The policy of one table, its saturated rows and its deferred gradients.

    Nothing is allocated for deferred gradients while no policy defers. Then: a sum, its key and the
    step it was begun in for each that there may be. A step looks at the keys and ages of all sums.

    Attributes:
        policy: as last configured.
        saturated: int64 [n], the saturated keys; replaced by whoever sets row flags.
        masked: the rows whose gradients are masked.
        buffer: the deferred gradients.
        is_active: scalar bool variable: whether gradients may be, or were, deferred.
        offered_rows: int64 scalar variable: gradient rows, one per key and step, before masking.
        masked_rows: int64 scalar variable: those of them that were left out.
    """

    def __init__(self, name: str, dim: int, device: str):
        """Masks nothing yet, and nothing is deferred.

        Args:
            name: of the table.
            dim: values per row.
            device: of the table.
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
        """Whether gradients of saturated rows are thrown away."""
        return self.policy.mode == "mask" and not self.policy.is_shadow

    def num_unapplied(self) -> int:
        """Returns how many deferred gradients are still to be applied (eager only)."""
        state = self.buffer.state()
        is_shadow = self.policy.is_shadow and not state.flushes
        return state.num_deferred if self.is_active.numpy() and not is_shadow else 0

    def configure(self, policy: UpdatePolicy, rows: np.ndarray, most: int) -> None:
        """Sets the policy; gradients deferred by one of another kind leave with the next step.

        Args:
            policy: of any mode; but for "defer", nothing is deferred.
            rows: int64 [n], the saturated rows as gradients name them.
            most: sums that there may be, of whatever policy.
        """
        before, self.policy = self.policy, policy
        if not policy.keeps_sums_of(before):
            self.buffer.flush(drops=before.is_shadow)
        is_mask, defers = policy.mode == "mask", policy.mode == "defer"
        self._only_counts.assign(policy.is_shadow and is_mask)
        self.masked.assign(rows if is_mask else rows[:0])
        limited = dataclasses.replace(policy, max_rows=min(policy.max_rows, most))
        self.buffer.configure(limited, limited.max_rows if defers else 0)
        self._by_interval.assign(rows if defers and policy.trigger == "interval" else rows[:0])
        self._movement.assign(policy.movement)
        # Until the next step, whatever this rank defers: all ranks must see the same.
        self.is_active.assign(defers or bool(self.is_active))

    def flush(self) -> None:
        """Makes all sums leave with the next step; those of shadow mode are dropped at once."""
        self.buffer.flush(drops=self.policy.is_shadow)

    def take(self, gradients: tf.IndexedSlices, movement: Movement) -> tf.IndexedSlices:
        """Sums the rows of each key, and returns what is to be applied now.

        Args:
            gradients: values float32 [n, dim].
            movement: under the optimizer.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`.
        """
        result = mask_gradients(gradients, self.masked)
        with tf.device("CPU:0"):
            self.offered_rows.assign_add(result.offered)
            self.masked_rows.assign_add(result.masked)
        # Conditions are tensors': the policy may change without retracing.
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
        self, indices: tf.Tensor, values: tf.Tensor, movement: Movement
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds a step's gradients to the sums; gives the sums that are due.

        In shadow mode gives what came in.
        """
        keys = tf.cast(indices, tf.int64)
        added = self.buffer.add(keys, values)
        may_wait = tf.cond(
            added.by_movement,
            lambda: movement(keys, added.sums) < self._movement,
            lambda: tf.zeros_like(keys, tf.bool),
        )
        due = self.buffer.take_due(self._by_interval, keys, added, may_wait)
        # A step whose data has ended runs what does not wait for its gradients: whatever changes
        # here needs a result of them.
        self.is_active.assign(due.defers)
        return tf.cond(
            due.is_shadow,
            lambda: (indices, values),
            lambda: (tf.cast(due.keys, indices.dtype), due.sums),
        )

    def counts(self) -> UpdateCounts:
        """Returns what became, or in shadow mode would have become, of gradient rows."""
        offered, masked, state = int(self.offered_rows), int(self.masked_rows), self.buffer.state()
        deferred = state.counts._asdict()
        added = deferred.pop("without_gradient") - deferred["deferred"]
        now = {"deferred_now": state.num_deferred, "deferred_bytes": state.nbytes}
        return UpdateCounts(offered, offered - masked + added, masked, **deferred, **now)


def _parts(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return slices.indices, slices.values


class WatchingStore(UpdatedElsewhere):
    """Base of the stores whose rows an optimizer of the user's updates."""

    flushes_with_next_step = True
    _movements: Movements
    _updater: Any  # What updates the rows; None: the store was not told.
    _watched: Mapping[str, WatchedGradients]

    def _variable(self, table: str) -> Any:
        """The variable of a table, as the optimizer updates it."""
        raise NotImplementedError

    def _rows_of(self, table: str, keys: np.ndarray) -> np.ndarray:
        """The indices that this rank's gradients have for its keys, int64 [n]."""
        return keys

    def _keys_of(self, table: str, rows: np.ndarray) -> np.ndarray:
        """The keys of `_rows_of`."""
        return rows

    def _is_own(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Whether this rank has the rows of keys, bool [n]."""
        return np.ones(keys.shape, bool)

    def mask_gradients(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums the rows of each key, and masks or defers as the policy says.

        Args:
            table: name of the table.
            gradients: of the table's variable, values float32 [n, dim], as they will be applied.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`: what is to be
            applied now, deferred gradients that are due included.

        Raises:
            ValueError: there is no such table, or the optimizer has no state yet.
            TypeError: these are no sparse gradients.
            tf.errors.InvalidArgumentError: an index is out of range (on a CPU).
        """
        movement = functools.partial(self._movement, self._require(table))
        return self._watched[table].take(gradients, movement)

    def _movement(self, table: str, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        if self._movements.unknown(self._updater) is not None:
            # Of a branch that no policy takes; a graph keeps it.
            return tf.fill(tf.shape(keys), np.float32(np.inf))
        return self._movements.of(self._updater, self._variable(table), keys, sums)

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """Replaces a table's saturated keys; see `TrackedStore.set_row_flags`."""
        flags, keys = np.asarray(flags, np.uint8), np.asarray(keys, np.int64)
        saturated = keys[(flags & SATURATED) > 0]
        self._watched[table].saturated = saturated[self._is_own(table, saturated)]
        self._configure(table, self._watched[table].policy)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Says whether gradients are masked or deferred, from the next step on.

        Those that were deferred under a policy of another kind leave with the next step.

        Args:
            table: name of the table.
            policy: the buffers that it needs are allocated here: `max_rows` sums at most, and
                never more than the table has rows.

        Raises:
            ValueError: gradients are to be deferred by movement, but how the optimizer moves rows
                is not known; moments are to decay, or ranks to be simulated: the optimizer is not
                the store's.
        """
        self._require_movement(self._require(table), policy, self._updater)
        self._require_policy(table, policy)
        self._configure(table, policy)

    def _require_movement(self, table: str, policy: UpdatePolicy, optimizer: Any) -> None:
        """Raises ValueError if nobody knows how far the optimizer would move deferred rows."""
        raise NotImplementedError

    def _most_deferred(self, table: str) -> int:
        """How many rows of a table may have deferred gradients, whatever the policy allows."""
        return self.size(table)

    def _configure(self, table: str, policy: UpdatePolicy) -> None:
        watched = self._watched[table]
        rows = self._rows_of(table, watched.saturated)
        watched.configure(policy, rows, self._most_deferred(table))

    def _policy_of(self, table: str) -> UpdatePolicy:
        return self._watched[table].policy

    def update_counts(self, table: str) -> UpdateCounts:
        """Returns what became, or in shadow mode would have become, of a table's gradient rows."""
        return self._watched[self._require(table)].counts()

    def _known_rate(self) -> Any:
        """The optimizer's learning rate, a scalar; 0 if it is not known."""
        raise NotImplementedError

    def export_deferred(self, table: str) -> dict[str, np.ndarray]:
        """Returns the deferred gradients of this rank's rows; they stay.

        As `ops.table` describes them, with the optimizer's learning rate, or 0 where the
        store does not know it; and "is_leaving", a bool: whether they all leave with the next step.
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
        """Replaces the deferred gradients; those of one key are added up.

        Args:
            table: name of the table.
            contents: as `export_deferred` gave them; keys that other ranks own are passed over.

        Raises:
            RuntimeError: there are some, but the policy defers nothing.
        """
        watched = self._watched[self._require(table)]
        is_own = self._is_own(table, np.asarray(contents["keys"]))
        keys, ages, sums = (contents[name][is_own] for name in ("keys", "ages", "sums"))
        if keys.size and watched.policy.mode != "defer":
            raise RuntimeError(
                f"{keys.size} gradient sums are to be deferred, but the policy defers nothing. Set "
                "a policy that does first."
            )
        watched.buffer.replace(*added_up(self._rows_of(table, keys), ages, sums))

    def flush_with_next_step(self, table: str) -> None:
        """Makes all deferred gradients of a table leave with the next step, whatever the policy."""
        self._watched[self._require(table)].buffer.flush()
