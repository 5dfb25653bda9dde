"""Stores that watch tables of the user's: gradients are masked or deferred before the optimizer.

In: a table's gradients on their way to an optimizer that is not the store's. Out: those that are to
be applied now. What is deferred leaves with the gradients of a later step. See `VariableStore` and
`SokStore`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.ops.update_policy import SATURATED, UpdateCounts, UpdatePolicy
from slipstream_tf.stores.base import UpdatedElsewhere
from slipstream_tf.stores.movement import Movements
from slipstream_tf.stores.watched_gradients import WatchedGradients


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
        """What this rank's gradients have in place of its keys, int64 [n]."""
        del table
        return keys

    def _keys_of(self, table: str, rows: np.ndarray) -> np.ndarray:
        """The keys of `_rows_of`."""
        del table
        return rows

    def _is_own(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Whether this rank has the rows of keys, bool [n]."""
        del table
        return np.ones(keys.shape, bool)

    def mask_gradients(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums the rows of each key, and masks or holds back as the policy says.

        Args:
            table: name of the table.
            gradients: of the table's variable, values float32 [n, dim], as they will be applied.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`: what is to be
            applied now, held sums that are due included.

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

    def mark_rows(self, table: str, keys: Any, marks: Any) -> None:
        """Replaces the saturated keys of a table by those marked so; see `TrackedStore.mark_rows`.

        Raises:
            ValueError: a mark is WATCHED: the store does not see updates, so that the drift metric
                "signal" needs another store.
        """
        marks, keys = np.asarray(marks, np.uint8), np.asarray(keys, np.int64)
        self._require_unwatched(table, marks)
        saturated = keys[(marks & SATURATED) > 0]
        self._watched[table].saturated = saturated[self._is_own(table, saturated)]
        self._configure(table, self._watched[table].policy)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Says whether gradients are masked or held back, from the next step on.

        Sums that were held under a policy of another kind leave with the next step.

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

    def export_pending(self, table: str) -> dict[str, np.ndarray]:
        """Returns the gradient sums that are held back, of this rank's rows; they stay.

        As `ops.table_state` describes them, with the optimizer's learning rate, or 0 where the
        store does not know it; and "is_leaving", a bool: whether they all leave with the next step.
        """
        watched = self._watched[self._require(table)]
        rows, ages, sums = watched.export()
        return {
            "keys": self._keys_of(table, rows),
            "ages": ages,
            "ranks": np.zeros(rows.size, np.int32),
            "sums": sums,
            "learning_rate": np.float32(self._known_rate()),
            "is_leaving": np.bool_(watched.is_leaving),
        }

    def import_pending(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the gradient sums that are held back; those of one key are added up.

        Args:
            table: name of the table.
            contents: as `export_pending` gave them; keys that other ranks own are passed over.

        Raises:
            RuntimeError: there are some, but the policy defers nothing.
        """
        watched = self._watched[self._require(table)]
        is_own = self._is_own(table, np.asarray(contents["keys"]))
        keys, ages, sums = (contents[name][is_own] for name in ("keys", "ages", "sums"))
        watched.replace(self._rows_of(table, keys), ages, sums)

    def let_go_of(self, table: str) -> None:
        """Makes all sums that a table holds leave with the next step, whatever the policy."""
        self._watched[self._require(table)].let_go(even_shadow=True)
