"""Base classes of stores, used by the engine, the layers and checkpoints.

Every store derives from one of these classes. A capability that only some stores have is a class
attribute with a default, so callers read the attribute and never test whether a store has a
method.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, shown
from slipstream_tf.config import Table
from slipstream_tf.ops.drift import row_drift
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.ops.sealed_rows import SealedRows
from slipstream_tf.ops.table import TableChanges
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.tables.rates import Rates


class SlotLayout(NamedTuple):
    """Describes the optimizer slots of a table's rows.

    Attributes:
        rule: Name of the optimizer that defines the slots: a class of `slipstream_tf.optimizers`,
            or another optimizer's name. None if it is unknown.
        initial: float32 [slots per row], the slots of a new row.
    """

    rule: str | None
    initial: np.ndarray


class TrackedStore:
    """Base class of all stores; the interface that the saturation engine uses.

    The argument `table` of a method is the name of a table.

    Attributes:
        tables: The tables, in the order of the table indices.
        comm: The communicator of the ranks that train the tables together. May be None in a single
            process. None if the code that passes gradients to the store handles the ranks.
        optimizer: The optimizer of tables that have no `optimizer` setting. None if the store does
            not know it.
        learning_rate: The learning rate of `optimizer`, a scalar. None if the store does not know
            it, or if the tables have different rates (see `learning_rate_of`).
        is_spread: Whether each row is stored on only one of the ranks, see `owners`. If so, `size`,
            `gather` and `measure` cover only the keys that this rank owns.
        is_in_sok: Whether the rows are stored in SOK. SOK creates missing rows, has
            `reserved_keys`, and needs separate access counts (`export_accesses`).
        wire: The `distributed.exchange.Wire` with which this package sends rows between ranks. None
            if this package does not send them.
        prefetches: Whether batches can be prefetched, see `distributed.ShardedStore.prefetch_keys`.
        spills: Whether rows may be on disk. If so, call `prefetch_rows` for the next batches.
        lists_hot_keys_by_key: Whether `hot_keys` accepts `by_key=True`, which sorts by key.
        takes_tables_at_once: Whether multiple threads may access different tables at once.
        collects_gradients: Whether gradients can be collected now and applied later, with
            `collect_gradients`, `exchange_collected`, `sum_of_parts` and `apply_collected` of
            `NativeStore`.
        forgets_flags: Whether a row that is removed and created again loses its flags. If so, the
            store implements `row_flags`.
    """

    tables: tuple[Table, ...]
    comm: Any = None
    optimizer: Any = None
    learning_rate: Any = None
    is_spread = False
    is_in_sok = False
    wire: Any = None
    prefetches = False
    spills = False
    lists_hot_keys_by_key = False
    takes_tables_at_once = False
    collects_gradients = False
    forgets_flags = False

    def __repr__(self) -> str:
        tables = shown([table.name for table in self.tables])
        ranks = ""
        if self.comm is not None and self.comm.size > 1:
            ranks = f" on rank {self.comm.rank} of {self.comm.size}"
        return f"<{type(self).__name__} with tables {tables}{ranks}>"

    @property
    def updates_rows(self) -> bool:
        """Whether the store applies the gradients to the rows."""
        return self.optimizer_of(self.tables[0].name) is not None

    def optimizer_of(self, table: str) -> SparseOptimizer | None:
        """Returns a table's sparse optimizer, or None for an external optimizer."""
        self._require(table)
        return self.optimizer if isinstance(self.optimizer, SparseOptimizer) else None

    def learning_rate_of(self, table: str) -> float | None:
        """Returns the learning rate of a table's next update.

        None if the store does not know it.
        """
        self._require(table)
        return None if self.learning_rate is None else float(self.learning_rate)

    def prefetch_rows(self, packed: PackedFeatures) -> None:
        """Starts to read the rows of a future batch from disk.

        Has no effect on tables that do not spill. Any number of batches may be prefetched, and a
        prefetched batch does not have to be looked up.

        Args:
            packed: The keys of the batch.
        """

    @property
    def rate_variables(self) -> list[Any]:
        """The variables that hold learning rates known to the store."""
        return [self.learning_rate] if hasattr(self.learning_rate, "assign") else []

    def follow(self, optimizer: Any) -> None:
        """Sets the dense layers' optimizer that the rates follow; see `Rates.follow`.

        Has no effect on stores without `Rates`.
        """

    @property
    def parts(self) -> tuple[Any, ...]:
        """The joined stores; only this store, unless it is a `JoinedStore`."""
        return (self,)

    def size(self, table: str) -> int:
        """Returns the number of rows of a table.

        If `is_spread`, only the rows of this rank count.
        """
        raise NotImplementedError

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns the rank that owns each key, if `is_spread`.

        Args:
            table: Name of the table.
            keys: int64 [n].

        Returns:
            int64 [n], the ranks.
        """
        raise NotImplementedError

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows without counting accesses. Only SOK creates the missing rows.

        Args:
            table: Name of the table.
            keys: int64 [n].

        Returns:
            rows: float32 [n, dim]. A key without a row returns the initial row of that key.
            found: bool [n], whether each key has a row. True for all keys in SOK and in a
                `ReplicatedStore` on multiple ranks.
        """
        raise NotImplementedError

    def measure(
        self, table: str, keys: Any, snapshot: tf.Tensor, metric: str
    ) -> tuple[Any, Any, Any]:
        """Reads rows and measures their distance from a snapshot.

        This version calls `gather`. Override it in stores that can do both in one pass, like
        `NativeStore`. Note: a subclass of such a store that overrides `gather` must override
        `measure` too.

        Args:
            table: Name of the table.
            keys: int64 [n].
            snapshot: float32 [n, dim], the earlier rows.
            metric: "linf" or "l2", see `ops.drift.row_drift`.

        Returns:
            rows: float32 [n, dim], as from `gather`.
            found: bool [n], as from `gather`.
            drift: float32 [n], the distances.
        """
        rows, found = self.gather(table, keys)
        with tf.device("CPU:0"):
            drift = row_drift(rows, snapshot, metric).numpy()
        return rows, found, drift

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most accessed keys of a table.

        Args:
            table: Name of the table.
            k: Maximum number of keys.

        Returns:
            keys: int64 [m], m at most k, by descending count, then ascending key. Keys with a count
                of 0 are not returned.
            counts: float32 [m], decayed access counts.
        """
        raise NotImplementedError

    def decay_counts(self, factor: float) -> None:
        """Multiplies the access counts of all tables by `factor`, in [0, 1]."""
        raise NotImplementedError

    _policies: dict[str, UpdatePolicy]

    def policy_of(self, table: str) -> UpdatePolicy:
        """Returns the current update policy of a table."""
        return self._policies[self._require(table)]

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Sets the policy for a table's gradients, from the next update.

        Args:
            table: Name of the table.
            policy: Whether the gradients are applied, masked or deferred.

        Raises:
            ValueError: The store does not support the policy.
        """
        raise NotImplementedError

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """Replaces the row flags of a table.

        Args:
            table: Name of the table.
            keys: int64 [n]. Keys without a row are ignored, except that stores with replicas
                create a replica. All other rows lose their flags.
            flags: uint8 [n], `ops.update_policy.SATURATED` (gradients are masked, or deferred by
                interval) or 0.
        """
        raise NotImplementedError

    def row_flags(self, table: str, keys: Any) -> np.ndarray:
        """Returns the current flags of rows, if `forgets_flags`.

        Args:
            table: Name of the table.
            keys: int64 [n].

        Returns:
            uint8 [n], as for `set_row_flags`.
        """
        raise NotImplementedError

    def update_counts(self, table: str) -> UpdateCounts:
        """Returns a table's counts of offered, masked and deferred gradient rows.

        The counts start when the store is created.
        """
        raise NotImplementedError

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {config.name: place for place, config in enumerate(self.tables)}

    def index_of(self, table: str) -> int:
        """Returns the index of a table in `tables`.

        Raises:
            ValueError: There is no table of this name.
        """
        if table not in self._places:
            allowed = "one of " + ", ".join(map(repr, self._places))
            raise invalid("table", table, "a store", allowed)
        return self._places[table]

    def _require(self, table: str) -> str:
        self.index_of(table)
        return table


class SavedStore(TrackedStore):
    """A store that checkpoints can save and restore.

    Attributes:
        has_replicas: Whether a rank holds replicas of rows of other ranks (`export_copies`).
        defers_at_owners: Whether a rank defers only gradients of rows that it stores.
        flushes_with_next_step: Whether deferred gradients cannot be applied at once, only together
            with the gradients of the next step (`flush_with_next_step`).
        writes_rows: Whether single rows can be written and removed, see `NativeStore.write_rows`.
    """

    has_replicas = False
    defers_at_owners = False
    flushes_with_next_step = False
    writes_rows = False

    def _num_unapplied(self, table: str) -> int:
        """Returns the number of deferred gradients to apply on this rank.

        In a dry run it is 0, because gradients were already applied and are only counted.
        """
        return 0 if self.policy_of(table).is_shadow else self.update_counts(table).deferred_now

    def _require_flushed(self, table: str) -> None:
        """Raises RuntimeError if one of multiple ranks has unapplied deferred gradients."""
        deferred = self._num_unapplied(table)
        if deferred and self.comm is not None and self.comm.size > 1:
            raise RuntimeError(
                f"Rank {self.comm.rank} has {deferred} deferred gradients of table {table!r}. Call "
                "flush() of the store on all ranks first."
            )

    def slot_layout(self, table: str) -> SlotLayout:
        """Returns the layout and the initial values of a table's optimizer slots."""
        dim, optimizer = self.tables[self.index_of(table)].dim, self.optimizer_of(table)
        if optimizer is None:
            return SlotLayout(None, np.empty(0, np.float32))
        return SlotLayout(optimizer.layout, optimizer.initial_slots(dim))

    def num_keys(self, table: str) -> int | None:
        """Returns n if keys are 0 to n - 1, or None.

        n includes the keys of all ranks. None means that a table accepts arbitrary keys.
        """
        self._require(table)
        return None

    def reserved_keys(self, table: str) -> tuple[int, ...]:
        """Returns the keys that cannot have a row."""
        self._require(table)
        return ()

    def keys_of(self, table: str) -> np.ndarray:
        """Returns this rank's keys that have a row, int64 [n], ascending."""
        return self.export_table(table, flush=False)["keys"]

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """Returns a table's contents as arrays, sorted by key.

        Args:
            table: Name of the table.
            flush: Whether to apply deferred gradients first. If False they stay deferred and the
                exported rows do not include them.

        Returns:
            The arrays of `table_contents`. If `is_spread`, only the rows of this rank.
        """
        raise NotImplementedError

    def export_changes(self, table: str, since: int) -> TableChanges:
        """Returns the rows changed since an earlier call.

        This version returns all rows. Deferred gradients are not applied. Tables for which
        `spills_rows` is true use `seal_rows` instead.

        Args:
            table: Name of the table.
            since: The `number` of the last result. 0, or another number, returns all rows.
        """
        contents = self.export_table(table, flush=False)
        none = np.empty(0, np.int64)
        return TableChanges(contents, none, none.astype(np.float32), is_all=True, number=0)

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces all contents of a table.

        If the contents are invalid, the table stays unchanged.

        Args:
            table: Name of the table.
            contents: Arrays as returned by `export_table`.
        """
        raise NotImplementedError

    def spills_rows(self, table: str) -> bool:
        """Returns whether rows of a table may be on disk.

        Such a table is exported with `seal_rows` and imported in parts with `add_rows`, because its
        rows may not fit in memory.
        """
        return self.spills and self.tables[self.index_of(table)].storage.spill is not None

    def seal_rows(self, table: str) -> SealedRows:
        """Writes all rows to disk, if `spills_rows`; returns their locations.

        See `ops.sealed_rows.SealedRows`. Rows that are already on disk are not written again.
        """
        raise NotImplementedError

    def add_rows(self, table: str, contents: Mapping[str, Any]) -> None:
        """Adds rows to the existing rows of a table, if `spills_rows`.

        Args:
            table: Name of the table.
            contents: Arrays as for `import_table`, with keys that have no row yet.
        """
        raise NotImplementedError

    def export_admission(self, table: str) -> dict[str, np.ndarray]:
        """Returns the admission counters of keys without a row.

        Only tables with `admits` have such counters. See `ops.table.export_admission`.
        """
        raise NotImplementedError

    def import_admission(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the admission counters.

        Args:
            table: Name of the table.
            contents: Result of `export_admission`.
        """
        raise NotImplementedError

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """Returns the keys and counts that this rank's batches accessed.

        The keys may belong to any rank.

        Returns:
            "keys": int64 [n], ascending.
            "counts": float32 [n], decayed, above 0.
        """
        contents = self.export_table(table, flush=False)
        is_accessed = contents["counts"] > 0.0
        return {name: contents[name][is_accessed] for name in ("keys", "counts")}

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces the access counts.

        Args:
            table: Name of the table.
            accesses: Result of `export_accesses`.
        """
        raise NotImplementedError

    def export_deferred(self, table: str) -> dict[str, np.ndarray]:
        """Returns the deferred gradients without applying or removing them.

        See `ops.table.export_deferred` for the arrays.
        """
        raise NotImplementedError

    def import_deferred(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the deferred gradients.

        Args:
            table: Name of the table.
            contents: Result of `export_deferred`.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Applies all deferred gradients of all tables.

        In a single process, evaluation lookups and exports of native tables do this themselves.
        """
        raise NotImplementedError

    def flush_with_next_step(self, table: str) -> None:
        """Schedules all deferred gradients of a table for the next step.

        They are applied even in a dry run. Available if `flushes_with_next_step`.
        """
        raise NotImplementedError

    def export_copies(self, table: str) -> dict[str, np.ndarray]:
        """Returns this rank's replicas, if `has_replicas`.

        See `tables.replicas.ReplicatingStore.export_copies`.
        """
        raise NotImplementedError

    def import_copies(
        self, table: str, contents: Mapping[str, Any], takes_flags: bool = True
    ) -> None:
        """Replaces this rank's replicas by the result of `export_copies`.

        Args:
            table: Name of the table.
            contents: Arrays as returned by `export_copies`.
            takes_flags: If True, restore the flags in `contents`. If False, rows keep their current
                flags.
        """
        raise NotImplementedError


class EmbeddingStore(SavedStore):
    """A store that owns rows, optimizer slots and access counts.

    Attributes:
        optimizer: The sparse optimizer of tables that have no `optimizer` setting.
        rates: The learning rates of the tables.
        advice: End of the error for a lookup that would be updated twice.
    """

    optimizer: SparseOptimizer
    rates: Rates

    @property
    def advice(self) -> str:
        """End of the error for a lookup that would be updated twice."""
        causes = (
            "Possible causes: a persistent tape or a second tape around the same lookup; a layer "
            "that is called in two tf.functions of a step; threads that train the same layer. Add "
            "the losses and call tape.gradient once"
        )
        if not self.collects_gradients:
            return f"{causes}."
        return (
            f"{causes}, or pass apply='step' to the layer and use "
            "slip.keras.CombinedOptimizer(optimizer)."
        )

    @property
    def learning_rate(self) -> tf.Variable | None:
        """The learning rate variable that all tables share, a scalar, or None.

        None if the tables have separate rates or a schedule. The variable excludes the factor by
        which rates follow the dense layers' optimizer (`Rates.follow`).
        """
        return self.rates.shared

    def optimizer_of(self, table: str) -> SparseOptimizer:
        return self.rates.optimizers[self.index_of(table)]

    def learning_rate_of(self, table: str) -> float:
        return self.rates.of(self.index_of(table))

    @property
    def rate_variables(self) -> list[Any]:
        return list(self.rates.variables)

    def follow(self, optimizer: Any) -> None:
        self.rates.follow(optimizer)

    def lookup(
        self,
        packed: PackedFeatures,
        training: bool,
        stacked: bool = False,
        joins_step: bool = False,
    ) -> tuple[list[tf.Tensor], Any]:
        """Looks up and pools the rows of a batch.

        Args:
            packed: The keys, from `features.pack`.
            training: If True, create the missing rows that the tables admit, and count accesses.
                If False, do neither.
            stacked: If True, return one tensor [batch, features, dim]; all tables must have the
                same dim. If False, return one tensor [batch, dim] per feature.
            joins_step: Whether the lookup belongs to the training step of earlier lookups, if the
                tables were not updated since. Then it does not count in the age of rows.

        Returns:
            pooled: A list of one float32 tensor per feature, or of one stacked tensor. A feature
                without a combiner returns the row of each key, [number of keys, dim].
            plan: The argument for `apply_gradients`; None unless `training`.
        """
        raise NotImplementedError

    def apply_gradients(self, plan: Any, gradients: Sequence[tf.Tensor]) -> tf.Operation | None:
        """Sums the gradients per key, then applies the update rule once.

        Args:
            plan: Plan from `lookup`. Alternatively a sum of `ops.row_gradients.row_gradients`; its
                lookups are one update, and `gradients` is empty. An update of the rows since one
                of the lookups is an error then, which ends with `advice`.
            gradients: float32 gradients of the pooled outputs. They are not rescaled: if the loss
                is a mean over the batch, its gradients already contain the factor.

        Returns:
            The operation in a graph; None in eager mode.
        """
        raise NotImplementedError


class UpdatedElsewhere(SavedStore):
    """Base class of stores with an external optimizer for the rows."""

    _moments_owner = "an external optimizer stores the moments"

    def _place_of(self, table: str) -> str:
        return f"table {self._require(table)!r} of a {type(self).__name__}"

    def _require_policy(self, table: str, policy: UpdatePolicy) -> None:
        place = self._place_of(table)
        if policy.decay_skipped:
            raise invalid("decay_moments", True, place, f"False, because {self._moments_owner}")
        if policy.ranks > 1:
            raise invalid(
                "ranks", policy.ranks, place, "1, because only a NativeStore simulates ranks"
            )


def table_contents(
    keys: np.ndarray,
    rows: np.ndarray,
    slots: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Returns the contents of a table as arrays, with default values.

    The result has the arrays of `ops.table.export_table`: "keys", "rows", "slots", "counts",
    "last_used" (empty here) and "steps".

    Args:
        keys: int64 [n], ascending.
        rows: float32 [n, dim].
        slots: float32 [n, slots per row]. None if there are no slots.
        counts: float32 [n]. None means 0.
        steps: int64 [2], the numbers of updates and lookups. None means 0.
    """
    return {
        "keys": keys,
        "rows": rows,
        "slots": np.empty((keys.size, 0), np.float32) if slots is None else slots,
        "counts": np.zeros(keys.size, np.float32) if counts is None else counts,
        "last_used": np.empty(0, np.int64),
        "steps": np.zeros(2, np.int64) if steps is None else steps,
    }
