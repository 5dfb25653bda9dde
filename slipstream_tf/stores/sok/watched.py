"""Tables in SOK whose gradients are masked or deferred at the rank that owns the rows.

In: keys of batches, and gradients as SOK has summed them over the ranks. Out: access counts, and
the gradients that are to be applied.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.errors import invalid
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.stores.access_counts import AccessCounts
from slipstream_tf.stores.by_key import UnchangedKeys
from slipstream_tf.stores.sok.library import slots_of
from slipstream_tf.stores.sok.optimizers import SokMovements
from slipstream_tf.stores.sok.table import SpreadStore
from slipstream_tf.stores.watching import WatchedGradients, WatchingStore

# Sums that there is room for at first, in a table of few rows; more as it grows.
_FEWEST_SUMS = 1 << 16


class WatchedTables(SpreadStore, WatchingStore):
    """Base of the stores that see gradients of their own rows, behind SOK's exchange.

    HKV tables that are full evict the rows that were written longest ago: rows of masked keys are
    written, as they are, with their slots, once a window.
    """

    defers_at_owners = True
    _movements = SokMovements()

    def _watch(self, updater: Any, counter: AccessCounts) -> None:
        """Starts with no saturated key.

        Args:
            updater: the optimizer of the opened variables, as SOK's; None: it is not known.
            counter: of accesses.
        """
        self._updater, self._counter = updater, counter
        self._table_of = {id(table.variable): name for name, table in self._opened.items()}
        self._unchanged = {name: UnchangedKeys() for name in self._opened}
        self._watched = {
            name: WatchedGradients(name, table.dim, table.variable.device)
            for name, table in self._opened.items()
        }
        if self._movements.unknown(updater) is None:
            dynamic = [t.variable for t in self._opened.values() if t.is_dynamic]
            self._movements.prepare(updater, dynamic)

    def count_accesses(self, packed: PackedFeatures, specs: Sequence[FeatureSpec]) -> None:
        """Counts the accesses of a batch of several features; `Slipstream.observe` does so.

        Args:
            packed: the keys, from `features.pack` with the same specs.
            specs: the features, in order.
        """
        self._counter.count(packed, specs)

    def withhold(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Masks or defers gradients of watched variables; call it before the optimizer.

        Args:
            grads_and_vars: pairs of gradient and variable. Those of other variables, and gradients
                of None, are returned as they are.

        Returns:
            The pairs, in their order.
        """
        return [
            (gradient, variable)
            if gradient is None or id(variable) not in self._table_of
            else (self.mask_gradients(self._table_of[id(variable)], gradient), variable)
            for gradient, variable in grads_and_vars
        ]

    def mask_gradients(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums the rows of each key, and masks or defers those of saturated keys.

        Args:
            table: name of the table.
            gradients: of the table's variable, as SOK gave them: indices of this rank's own rows.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`: what is to be
            applied now, deferred gradients that are due included.

        Raises:
            ValueError: there is no such table.
            TypeError: these are no sparse gradients.
        """
        # What came from other ranks has no shape in a graph.
        shaped = tf.IndexedSlices(
            tf.ensure_shape(gradients.values, [None, self._table(table).dim]),
            tf.ensure_shape(gradients.indices, [None]),
            gradients.dense_shape,
        )
        return super().mask_gradients(table, shaped)

    def _movement(self, table: str, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        if not self._table(table).is_dynamic:
            # Of a branch that no policy takes.
            return tf.fill(tf.shape(keys), np.float32(np.inf))
        return super()._movement(table, keys, sums)

    def _variable(self, table: str) -> Any:
        return self._table(table).variable

    def _rows_of(self, table: str, keys: np.ndarray) -> np.ndarray:
        return self._table(table).indices(keys)

    def _keys_of(self, table: str, rows: np.ndarray) -> np.ndarray:
        return self._table(table).keys_of(rows)

    def _is_own(self, table: str, keys: np.ndarray) -> np.ndarray:
        found = self._table(table)
        return found.owners(keys) == found.rank

    def _known_rate(self) -> Any:
        is_known = self._movements.unknown(self._updater) is None
        return self._movements.learning_rate(self._updater) if is_known else 0.0

    def _flush_by(self, optimizer: Any) -> None:
        """Applies all deferred gradients, as one more update of an optimizer."""
        pairs = []
        for name, found in self._opened.items():
            self._watched[name].flush()
            empty, shape = tf.zeros([0, found.dim]), tf.constant([0, found.dim])
            nothing = tf.IndexedSlices(empty, tf.zeros([0], tf.int64), shape)
            pairs.append((self.mask_gradients(name, nothing), found.variable))
        optimizer.apply_gradients(pairs)

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """Replaces a table's saturated keys; see `TrackedStore.set_row_flags`."""
        found, watched = self._table(table), self._watched[self._require(table)]
        before = watched.saturated
        super().set_row_flags(table, keys, flags)
        # Of the window that ends, too: keys that are no longer masked would else be evicted before
        # they are written again.
        touched = np.union1d(before, watched.saturated)
        found.touch(touched, slots_of(self._updater, found.variable).values())
        # What was deferred under another policy leaves with the next step.
        if watched.masks and not watched.buffer.state().num_deferred:
            self._unchanged[table].replace(np.unique(watched.saturated), time.time())
        else:
            self._unchanged[table].forget()

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Says whether gradients of saturated keys are masked or deferred, from the next step on.

        Raises:
            ValueError: gradients are to be deferred by movement, and nobody knows how far the
                optimizer would move the rows; or moments are to decay, or ranks to be simulated:
                the optimizer is not the store's.
        """
        masked = self._watched[self._require(table)].masks
        super().set_update_policy(table, policy)
        if not (masked and self._watched[table].masks):
            self._unchanged[table].forget()

    def _require_movement(self, table: str, policy: UpdatePolicy, optimizer: Any) -> None:
        if policy.mode != "defer" or policy.trigger != "movement":
            return
        allowed, unknown = "", self._movements.unknown(optimizer)
        if unknown is not None:
            allowed = (
                "Interval(...), or a store with one of these optimizers: "
                f"{self._movements.known}; it has {unknown}"
            )
        elif not self._table(table).is_dynamic:
            allowed = "Interval(...): SOK's optimizers update its dynamic variables only"
        if allowed:
            raise invalid("until", "Movement", self._place_of(table), allowed)

    def _most_deferred(self, table: str) -> int:
        found = self._table(table)
        # All the sums that fit the budget would take its memory at once.
        return max(2 * found.size(), _FEWEST_SUMS) if found.is_dynamic else found.size()

    def unchanged_since(self, table: str, moment: float) -> np.ndarray:
        """Returns int64 [n]: keys of this rank whose gradients have been masked since a time.

        Their rows were written since, once a window, but as they are.

        Args:
            table: name of the table.
            moment: in seconds since 1970.
        """
        return self._unchanged[self._require(table)].since(moment)

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `TrackedStore.hot_keys`; of this rank's own batches."""
        return self._counter.hot_keys(self._require(table), k)

    def decay_counts(self, factor: float) -> None:
        """Multiplies the access counts of all tables by `factor`, 0 to 1."""
        self._counter.decay_counts(factor)

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """Returns what this rank's batches accessed of a table, of any rank's keys.

        Returns:
            "keys" int64 [n], ascending; "counts" float32 [n], decayed, above 0.
        """
        return self._counter.export_accesses(self._require(table))

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces access counts by what `export_accesses` gave; estimated ones start anew."""
        self._counter.import_accesses(self._require(table), accesses)
