"""The contract of an embedding store, which the saturation engine and the layers rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from slipstream_tf.config import TableConfig
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy
from slipstream_tf.optimizers import SparseOptimizer


class TrackedStore(Protocol):
    """What the saturation engine asks of a store.

    A store whose rows are spread over ranks also has `owners(table, keys)`, int64 [n]: `gather`,
    `travelled` and `measure` are then asked for a rank's own keys only. A store with copies of
    other ranks' rows has `freeze`, `frozen_keys` and `least_accesses`; see
    `distributed.ShardedStore`. A store with `lists_hot_keys_by_key = True` has a `hot_keys` that
    takes `by_key=True`: the keys are then ascending. One with `takes_tables_at_once = True` may be
    asked for several tables by several threads. A store that can read rows, their drifts and
    `travelled` in one pass has `measure`, which is then asked instead of the others; see
    `NativeStore`. A subclass of such a store that has a `gather` or `travelled` of its own needs a
    `measure` of its own, too.

    Attributes:
        tables: the tables, in the order that table indices refer to.
    """

    tables: tuple[TableConfig, ...]

    def size(self, table: str) -> int:
        """Returns the number of keys in a table."""
        ...

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows without making or counting keys.

        Args:
            table: name of the table.
            keys: int64 [n].

        Returns:
            rows float32 [n, dim] and found bool [n]; an absent key gives its initial row.
        """
        ...

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the at most k most accessed keys.

        Returns:
            keys int64 [m] and decayed counts float32 [m], by count descending, then key
            ascending; keys with a count of 0 are left out.
        """
        ...

    def decay_counts(self, factor: float) -> None:
        """Multiplies the access counts of all tables by `factor`, 0 to 1."""
        ...

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Says what becomes of a table's gradients from the next update on."""
        ...

    def mark_rows(self, table: str, keys: Any, marks: Any) -> None:
        """Replaces the marks of a table's rows.

        Args:
            table: name of the table.
            keys: int64 [n]; keys without a row are passed over, rows not named lose their marks.
            marks: uint8 [n], of `ops.update_policy.SATURATED` (masked, or deferred by interval)
                and WATCHED (the squared lengths of its updates are summed, from 0).
        """
        ...

    def travelled(self, table: str, keys: Any) -> np.ndarray:
        """Returns float32 [n]: the watched rows' summed squared update lengths; 0 for others."""
        ...

    def set_travelled(self, table: str, keys: Any, travelled: Any) -> None:
        """Replaces what `travelled` gives of watched rows, float32 [n]; after `mark_rows`."""
        ...

    def update_counts(self, table: str) -> UpdateCounts:
        """Returns what became of a table's gradient rows since the store was made."""
        ...


class EmbeddingStore(TrackedStore, Protocol):
    """Owns the rows, optimizer slots and access counts of one or more tables.

    Attributes:
        optimizer: the sparse optimizer of all tables.
        learning_rate: float32 scalar variable, read in every update.
    """

    optimizer: SparseOptimizer
    learning_rate: tf.Variable

    def lookup(
        self,
        packed: PackedFeatures,
        specs: Sequence[FeatureSpec],
        training: bool,
        stacked: bool = False,
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Pools the rows of a batch.

        Args:
            packed: the keys, from `features.pack` with the same specs.
            specs: the features, in order.
            training: make missing keys and count accesses; else neither.
            stacked: one tensor [batch, features, dim] (tables of equal dim) instead of one
                [batch, dim] per feature.

        Returns:
            (pooled, plan): float32 tensors; the plan for `apply_gradients`, None unless training.
        """
        ...

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """Sums the gradients of each key of a lookup and applies the optimizer's rule once.

        Args:
            plan: from `lookup`.
            gradients: float32, of its pooled outputs. Used as given: those of a loss that is a
                mean over the batch stay so.
        """
        ...

    def flush(self) -> None:
        """Applies all deferred gradients; evaluation lookups and exports do so by themselves."""
        ...

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """Returns all of a table as arrays, sorted by key.

        Args:
            table: name of the table.
            flush: whether deferred gradients are applied before; else they stay, and are not in.
        """
        ...

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces all of a table by what `export_table` gave; all or nothing."""
        ...

    def export_pending(self, table: str) -> dict[str, np.ndarray]:
        """Returns the deferred gradients, as `ops.table_state` describes them; they stay."""
        ...

    def import_pending(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the gradient sums that are held back by what `export_pending` gave."""
        ...
