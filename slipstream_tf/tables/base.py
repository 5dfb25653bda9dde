"""The contracts of stores, which the saturation engine, the layers and checkpoints rely on.

A store derives from one of these classes. What not every store can do is a field of the class, with
what holds for most as its default: nobody looks whether a store has a method.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.config import Table
from slipstream_tf.ops.drift import row_drift
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.ops.sealed_rows import SealedRows
from slipstream_tf.ops.table import Changes
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.tables.rates import Rates


class SlotLayout(NamedTuple):
    """The slots of a table's rows.

    Attributes:
        rule: whose they are: a class of `slipstream_tf.optimizers`, or an optimizer's own name;
            None: nobody knows them.
        initial: float32 [slots per row], of a new row.
    """

    rule: str | None
    initial: np.ndarray


class TrackedStore:
    """What the saturation engine asks of a store; the others are kinds of it.

    Attributes:
        tables: the tables, in the order that table indices refer to.
        comm: the ranks that train the tables together; None: this process alone, or whoever gives
            the store gradients knows them.
        optimizer: what updates the rows of tables without an optimizer of their own; None: the
            store was not told.
        learning_rate: of the optimizer, a scalar; None: the store does not know it, or tables have
            rates of their own (`learning_rate_of`).
        is_spread: whether each row is on one rank, which `owners` names; `size`, `gather`
            and `measure` are then of a rank's own keys only.
        is_in_sok: whether the rows are in SOK: it makes those that are missing, some keys are
            `reserved_keys`, and accesses are counted apart (`export_accesses`).
        wire: a `distributed.exchange.Wire`: how this package sends the rows between ranks; None: it
            does not.
        prefetches: whether batches may be announced; see `distributed.ShardedStore.announce`.
        spills: whether rows may be on disk, so that batches should be told to `announce_rows`.
        lists_hot_keys_by_key: whether `hot_keys` takes `by_key=True`: keys are then ascending.
        takes_tables_at_once: whether several threads may ask for several tables.
        collects_gradients: whether gradients can be collected now and applied later:
            `collect_gradients`, `share_collected`, `sum_of_parts` and `apply_collected`, see
            `NativeStore`.
        forgets_flags: whether a row that leaves and comes back has lost its flags, as `row_flags`
            tells.
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

    @property
    def updates_rows(self) -> bool:
        """Whether the rows are the store's to update."""
        return self.rule_of(self.tables[0].name) is not None

    def rule_of(self, table: str) -> SparseOptimizer | None:
        """Returns the update rule of a table's rows; None: they are not the store's to update."""
        self._require(table)
        return self.optimizer if isinstance(self.optimizer, SparseOptimizer) else None

    def learning_rate_of(self, table: str) -> float | None:
        """Returns the rate of a table's next update; None: the store does not know it."""
        self._require(table)
        return None if self.learning_rate is None else float(self.learning_rate)

    def announce_rows(self, packed: PackedFeatures) -> None:
        """Begins to read the rows of a batch to come from the disk, where tables spill.

        Any number of batches may be announced, and a batch need not be looked up.

        Args:
            packed: the batch's keys.
        """

    @property
    def rate_variables(self) -> list[Any]:
        """The variables of the tables' rates that the store knows."""
        return [self.learning_rate] if hasattr(self.learning_rate, "assign") else []

    def follow(self, optimizer: Any) -> None:
        """Says which optimizer of the dense layers the tables' rates follow; see `Rates.follow`."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """The stores that this one joins; mostly itself alone."""
        return (self,)

    def size(self, table: str) -> int:
        """Returns the number of keys in a table."""
        raise NotImplementedError

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n]: the rank that owns each key, int64 [n], where `is_spread`."""
        raise NotImplementedError

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows without making or counting keys.

        Args:
            table: name of the table.
            keys: int64 [n].

        Returns:
            rows float32 [n, dim] and found bool [n]; an absent key gives its initial row.
        """
        raise NotImplementedError

    def measure(
        self, table: str, keys: Any, snapshot: tf.Tensor, metric: str
    ) -> tuple[Any, Any, Any]:
        """Reads rows, and how far they are from a snapshot; see `ops.table.measure`.

        Goes by `gather`. A store that does it in one pass, as `NativeStore`, has a method of its
        own; a subclass of that with another `gather` needs one, too.
        """
        rows, found = self.gather(table, keys)
        with tf.device("CPU:0"):
            drift = row_drift(rows, snapshot, metric).numpy()
        return rows, found, drift

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the at most k most accessed keys.

        Returns:
            keys int64 [m] and decayed counts float32 [m], by count descending, then key
            ascending; keys with a count of 0 are left out.
        """
        raise NotImplementedError

    def decay_counts(self, factor: float) -> None:
        """Multiplies the access counts of all tables by `factor`, 0 to 1."""
        raise NotImplementedError

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Says what becomes of a table's gradients from the next update on."""
        raise NotImplementedError

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """Replaces the row flags of a table.

        Args:
            table: name of the table.
            keys: int64 [n]; keys without a row are passed over, rows not named lose their flags.
            flags: uint8 [n], `ops.update_policy.SATURATED` (masked, or deferred by interval) or 0.
        """
        raise NotImplementedError

    def row_flags(self, table: str, keys: Any) -> np.ndarray:
        """Returns uint8 [n], the flags that rows still have, where `forgets_flags`."""
        raise NotImplementedError

    def update_counts(self, table: str) -> UpdateCounts:
        """Returns what became of a table's gradient rows since the store was made."""
        raise NotImplementedError

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {config.name: place for place, config in enumerate(self.tables)}

    def index_of(self, table: str) -> int:
        """Returns a table's place among `tables`; ValueError: there is none of that name."""
        if table not in self._places:
            allowed = "one of " + ", ".join(map(repr, self._places))
            raise invalid("table", table, "a store", allowed)
        return self._places[table]

    def _require(self, table: str) -> str:
        self.index_of(table)
        return table


class SavedStore(TrackedStore):
    """What checkpoints ask of a store besides.

    Attributes:
        has_replicas: whether a rank has copies of others' rows (`export_copies`).
        defers_at_owners: whether a rank defers gradients of its own rows only.
        flushes_with_next_step: whether deferred gradients cannot be applied at once: they leave
            with the gradients of the next step (`flush_with_next_step`).
        writes_rows: whether single rows can be written and removed; see `NativeStore.write_rows`.
    """

    has_replicas = False
    defers_at_owners = False
    flushes_with_next_step = False
    writes_rows = False

    def _policy_of(self, table: str) -> UpdatePolicy:
        """The update policy of a table, as last set."""
        raise NotImplementedError

    def _num_unapplied(self, table: str) -> int:
        """Deferred gradients that this rank is still to apply, which those of a dry run are not."""
        return 0 if self._policy_of(table).is_shadow else self.update_counts(table).deferred_now

    def _require_flushed(self, table: str) -> None:
        """Raises RuntimeError if this rank, one of several, has deferred gradients to apply."""
        deferred = self._num_unapplied(table)
        if deferred and self.comm is not None and self.comm.size > 1:
            raise RuntimeError(
                f"Rank {self.comm.rank} defers {deferred} gradient sums of table {table!r}. Call "
                "flush() of the store on all ranks first."
            )

    def slot_layout(self, table: str) -> SlotLayout:
        """Returns whose slots the rows of a table have, and how they start."""
        dim, rule = self.tables[self.index_of(table)].dim, self.rule_of(table)
        if rule is None:
            return SlotLayout(None, np.empty(0, np.float32))
        return SlotLayout(rule.layout, rule.initial_slots(dim))

    def num_keys(self, table: str) -> int | None:
        """Returns how many keys, from 0, a table has on all ranks; None: any number of any."""
        self._require(table)
        return None

    def reserved_keys(self, table: str) -> tuple[int, ...]:
        """Returns the keys that can have no row."""
        self._require(table)
        return ()

    def keys_of(self, table: str) -> np.ndarray:
        """Returns int64 [n], the keys that have a row on this rank, ascending."""
        return self.export_table(table, flush=False)["keys"]

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """Returns all of a table as arrays, sorted by key.

        Args:
            table: name of the table.
            flush: whether deferred gradients are applied before; else they stay, and are not in.
        """
        raise NotImplementedError

    def export_changes(self, table: str, since: int) -> Changes:
        """Returns the rows that changed, or all; see `ops.table.export_changes`.

        Nothing is flushed. Where `spills_rows` they are sealed instead.
        """
        contents = self.export_table(table, flush=False)
        none = np.empty(0, np.int64)
        return Changes(contents, none, none.astype(np.float32), is_all=True, number=0)

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces all of a table by what `export_table` gave; all or nothing."""
        raise NotImplementedError

    def spills_rows(self, table: str) -> bool:
        """Whether rows of a table may be on disk: they are sealed, and added, not all at once."""
        return self.spills and self.tables[self.index_of(table)].storage.spill is not None

    def seal_rows(self, table: str) -> SealedRows:
        """Brings all rows of a table to the disk, where `spills_rows`; says where they are."""
        raise NotImplementedError

    def add_rows(self, table: str, contents: Mapping[str, Any]) -> None:
        """Adds rows to a table, where `spills_rows`, as `import_table` takes them."""
        raise NotImplementedError

    def export_admission(self, table: str) -> dict[str, np.ndarray]:
        """Returns what a table that `admits` knows of keys without a row; see `ops.table`."""
        raise NotImplementedError

    def import_admission(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces that by what `export_admission` gave."""
        raise NotImplementedError

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """Returns what this rank's batches accessed of a table, of any rank's keys.

        Returns:
            "keys" int64 [n], ascending; "counts" float32 [n], decayed, above 0.
        """
        contents = self.export_table(table, flush=False)
        is_accessed = contents["counts"] > 0.0
        return {name: contents[name][is_accessed] for name in ("keys", "counts")}

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces access counts by what `export_accesses` gave."""
        raise NotImplementedError

    def export_deferred(self, table: str) -> dict[str, np.ndarray]:
        """Returns the deferred gradients, as `ops.table` describes them; they stay."""
        raise NotImplementedError

    def import_deferred(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the deferred gradients by what `export_deferred` gave."""
        raise NotImplementedError

    def flush(self) -> None:
        """Applies all deferred gradients; evaluation lookups and exports do so by themselves."""
        raise NotImplementedError

    def flush_with_next_step(self, table: str) -> None:
        """Makes all deferred gradients of a table leave with the next step, whatever the policy."""
        raise NotImplementedError

    def export_copies(self, table: str) -> dict[str, np.ndarray]:
        """Returns this rank's copies of rows, where it `has_replicas`; see `ShardedStore`."""
        raise NotImplementedError

    def import_copies(
        self, table: str, contents: Mapping[str, Any], takes_flags: bool = True
    ) -> None:
        """Replaces this rank's copies by those of `export_copies`.

        Args:
            table: name of the table.
            contents: as `export_copies` returned them.
            takes_flags: whether rows get the flags that they had; else those that they have now.
        """
        raise NotImplementedError


class EmbeddingStore(SavedStore):
    """Owns the rows, optimizer slots and access counts of one or more tables.

    Attributes:
        optimizer: the sparse optimizer of the tables without one of their own.
        rates: what the tables' rows move by.
    """

    optimizer: SparseOptimizer
    rates: Rates

    @property
    def learning_rate(self) -> tf.Variable | None:
        """The variable that all tables' rates are, before they follow; None: there are several."""
        return self.rates.shared

    def rule_of(self, table: str) -> SparseOptimizer:
        """See `TrackedStore.rule_of`."""
        return self.rates.rules[self.index_of(table)]

    def learning_rate_of(self, table: str) -> float:
        """See `TrackedStore.learning_rate_of`."""
        return self.rates.of(self.index_of(table))

    @property
    def rate_variables(self) -> list[Any]:
        """See `TrackedStore.rate_variables`."""
        return list(self.rates.variables)

    def follow(self, optimizer: Any) -> None:
        """See `TrackedStore.follow`."""
        self.rates.follow(optimizer)

    def lookup(
        self, packed: PackedFeatures, training: bool, stacked: bool = False
    ) -> tuple[list[tf.Tensor], Any]:
        """Pools the rows of a batch.

        Args:
            packed: the keys, from `features.pack`.
            training: make missing keys and count accesses; else neither.
            stacked: one tensor [batch, features, dim] (tables of equal dim) instead of one
                [batch, dim] per feature.

        Returns:
            (pooled, plan): float32 tensors; the plan for `apply_gradients`, None unless training.
        """
        raise NotImplementedError

    def apply_gradients(self, plan: Any, gradients: Sequence[tf.Tensor]) -> tf.Operation | None:
        """Sums the gradients of each key of a lookup and applies the optimizer's rule once.

        Args:
            plan: from `lookup`.
            gradients: float32, of its pooled outputs. Used as given: those of a loss that is a
                mean over the batch stay so.
        """
        raise NotImplementedError


class UpdatedElsewhere(SavedStore):
    """Base of stores whose rows other optimizers update, so that moments are not the store's."""

    _whose_moments = "the optimizer is not the store's"

    def _place_of(self, table: str) -> str:
        return f"table {self._require(table)!r} of a {type(self).__name__}"

    def _require_policy(self, table: str, policy: UpdatePolicy) -> None:
        place = self._place_of(table)
        if policy.decay_skipped:
            raise invalid("decay_moments", True, place, f"False: {self._whose_moments}")
        if policy.ranks > 1:
            raise invalid("ranks", policy.ranks, place, "1")


def table_contents(
    keys: np.ndarray,
    rows: np.ndarray,
    slots: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Returns the arrays of `ops.table.export_table` of a store that does not have all of them.

    Args:
        keys: int64 [n], ascending.
        rows: float32 [n, dim].
        slots: float32 [n, slots per row]; None: there are none.
        counts: float32 [n]; None: 0.
        steps: int64 [2], updates and lookups; None: 0.
    """
    return {
        "keys": keys,
        "rows": rows,
        "slots": np.empty((keys.size, 0), np.float32) if slots is None else slots,
        "counts": np.zeros(keys.size, np.float32) if counts is None else counts,
        "last_used": np.empty(0, np.int64),
        "steps": np.zeros(2, np.int64) if steps is None else steps,
    }
