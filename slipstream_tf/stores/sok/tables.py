"""Embedding tables of our own that SOK holds: what is the same however their rows are looked up.

In: the tables' settings and a rule of this package. Out: variables of SOK with an optimizer, rows,
and what checkpoints of any number of ranks, and of any kind of store, need of them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf.config import Storage, Table
from slipstream_tf.errors import invalid, require_choice
from slipstream_tf.stores.base import EmbeddingStore, table_contents
from slipstream_tf.stores.by_key import counts_of
from slipstream_tf.stores.native import NativeStore
from slipstream_tf.stores.rates import Rates
from slipstream_tf.stores.sok import hkv
from slipstream_tf.stores.sok.library import open_sok, wrap_optimizer
from slipstream_tf.stores.sok.optimizers import (
    SokRule,
    export_rows,
    own_part,
    replace_rows,
    same_rule,
)
from slipstream_tf.stores.sok.table import SokTable, SpreadStore

VAR_TYPES = ("hybrid", "hbm")


class SokTables(SpreadStore, EmbeddingStore):
    """Tables in variables of SOK's, spread over the ranks by key modulo their number.

    A variable of SOK starts with zeros: it holds what training added to the initial row of a key,
    which follows from the table's seed and is the same on all ranks.

    Attributes:
        tables: as given.
        optimizer: the rule of all tables.
        rates: what the tables' rows move by; one for all.
        comm: the ranks, or None.
    """

    joins_parts = True
    _whose_moments = "SOK keeps the moments"

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer,
        comm: Any,
        var_type: str,
        settings: Mapping[str, Any] | None,
    ):
        """Makes empty tables; see the stores.

        Raises:
            ImportError: SOK cannot be loaded here.
            ValueError: a table or setting that SOK cannot have, or a rule that it does not know.
        """
        require_choice("var_type", var_type, VAR_TYPES, type(self).__name__)
        self.tables, self.comm = tuple(tables), comm
        self.optimizer = optimizers.the_one_of(tables, optimizer, "SOK's tables")
        self._settings = {t.name: _settings_of(t, var_type, settings or {}) for t in self.tables}
        self._sok = open_sok()
        self._require_ranks(int(self._sok.communication.num_ranks()))
        with tf.device("CPU:0"):
            self._steps = tf.Variable([0, 0], dtype=tf.int64, trainable=False)
        # Of which no row is ever made: it gives the initial rows.
        self._initial = NativeStore(
            [dataclasses.replace(t, optimizer=None, retention=None) for t in self.tables],
            optimizers.SGD(0.0),
        )
        shared = [dataclasses.replace(t, optimizer=None) for t in self.tables]
        self.rates = Rates(shared, self.optimizer, lambda _: self._steps[0])
        # What was imported so far, of tables that come in parts.
        self._parts: dict[str, list[Mapping[str, Any]]] | None = None
        with tf.init_scope():
            self._opened = {table.name: self._made(table, var_type) for table in self.tables}
            self._updater = wrap_optimizer(same_rule(self.optimizer, self._rate_now))
            # Now, so that no step that is traced has to make variables.
            self._updater._create_slots([table.variable for table in self._opened.values()])
        self._rule = SokRule(self._updater)

    def _rate_now(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.rates.now())

    def _made(self, table: Table, var_type: str) -> SokTable:
        variable = self._sok.DynamicVariable(
            dimension=table.dim,
            initializer="0.0",
            var_type=var_type,
            name=f"slipstream_{table.name}",
            # Updates happen in the backward pass, not by the model's optimizer.
            trainable=False,
            **self._settings[table.name],
        )
        return SokTable(table.name, variable, self._sok)

    def variable(self, table: str) -> Any:
        """Returns the `sok.DynamicVariable` of a table: what training added to initial rows."""
        return self._table(table).variable

    def _with_initial(self, table: str, keys: Any, trained: tf.Tensor) -> tf.Tensor:
        """Adds the initial rows of keys to what training added to them."""
        with tf.device("CPU:0"):
            rows, _ = self._initial.gather(table, keys)
            return rows + trained

    def _read(self, found: SokTable, keys: np.ndarray) -> tf.Tensor:
        return self._with_initial(found.name, keys, found.read(keys))

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """See `EmbeddingStore.export_table`; of the rows on this rank.

        Args:
            table: name of the table.
            flush: whether deferred gradients are to be in; else they stay, and are not in.

        Returns:
            The arrays of `ops.table.export_table`, from which a native table can be made, too;
            "trained", float32 [n, dim], the rows as SOK has them; "powers", float32, what Adam's
            bias correction goes by. Access counts are those of a single rank, and 0 of several:
            a rank knows those of its own batches only (`export_accesses`).

        Raises:
            RuntimeError: deferred gradients are to be in, and one of several ranks has some.
        """
        found = self._table(table)
        if flush:
            self._require_flushed(table)
            if self._num_unapplied(table):
                self.flush()
        own = export_rows(found, self._rule)
        keys, trained = own["keys"], own["rows"]
        counts = counts_of(keys, **self.export_accesses(table)) if self._ranks == 1 else None
        rows = self._with_initial(table, keys, tf.constant(trained)).numpy()
        return {
            **table_contents(keys, rows, own["slots"], counts, self._steps.numpy()),
            "trained": trained,
            "powers": self._rule.export()[1],
        }

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces all of a table by what `export_table` gave, of any ranks and kind of store.

        SOK cannot take keys out: those that the table has and the contents do not start anew, and
        take room as before. A single rank takes the access counts over. What SOK holds is a row
        less its initial row: of other stores' contents that difference is rounded, so that a row
        comes back to within 2^-23 of the two values' magnitudes.

        Args:
            table: name of the table.
            contents: keys that other ranks own are passed over; of a native table's, "trained" and
                "powers" are missing.

        Raises:
            ValueError: an array is missing, or of another shape, or a key is one that SOK uses.
                Nothing is changed then.
            RuntimeError: the table had no room, and SOK evicted rows of the contents.
        """
        found = self._table(table)
        if self._parts is not None:
            self._parts[table].append(contents)
            return
        own = own_part(found, self._rule, contents, optional=("trained",))
        own["rows"] = self._trained(found, own)
        replace_rows(found, self._rule, own)
        self._steps.assign(contents["steps"])
        self._rule.replace(contents)
        if self._ranks == 1:
            is_accessed = np.asarray(contents["counts"]) > 0.0
            self.import_accesses(
                table, {n: np.asarray(contents[n])[is_accessed] for n in ("keys", "counts")}
            )

    def _trained(self, found: SokTable, own: Mapping[str, np.ndarray]) -> np.ndarray:
        """What SOK is to hold of rows, float32 [n, dim]: as it held them, or their difference."""
        keys, rows = own["keys"], np.asarray(own["rows"], np.float32)
        difference = rows - self._with_initial(found.name, keys, tf.zeros(rows.shape)).numpy()
        if "trained" not in own:
            return difference
        # Of a table of another seed or initializer the sum would be another row.
        trained = np.asarray(own["trained"], np.float32)
        sums = self._with_initial(found.name, keys, tf.constant(trained)).numpy()
        return np.where((sums == rows).all(axis=1, keepdims=True), trained, difference)

    @contextlib.contextmanager
    def joining_parts(self) -> Iterator[None]:
        """Within it, tables are imported in parts, such as each rank exported; whole at its end.

        Steps and powers are those of the last part. A table of which no part came stays as it is.
        """
        parts = self._parts = {table.name: [] for table in self.tables}
        try:
            yield
        finally:
            self._parts = None
        for table, contents in parts.items():
            if contents:
                self.import_table(table, _joined(contents))

    def _apply_deferred(self, apply: Callable[[], Any]) -> None:
        """Applies deferred gradients as if they had come with the last update: it counts as none.

        Of before the first update they are a part of it.
        """
        powers = self._rule.powers()
        before = [power.read_value() for power in powers]
        for power, beta in zip(powers, self._rule.betas(), strict=True):
            last = tf.math.divide_no_nan(power, beta)
            power.assign(tf.where(self._steps[0] > 0, last, power))
        apply()
        for power, value in zip(powers, before, strict=True):
            power.assign(value)


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks exported of a table, as one rank would have."""
    of_keys = [name for name in ("rows", "slots", "counts", "trained") if name in parts[-1]]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ("keys", *of_keys)}
    return {**parts[-1], **joined}


def _settings_of(table: Table, var_type: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a table's variable, checked."""
    place = f"table {table.name!r} of SOK's"
    if table.storage != Storage():
        allowed = (
            "Storage(): HKV keeps rows as float32; how much of them is in the GPU's memory, and "
            "not the host's, is settings['max_hbm_for_vectors'], in GiB"
        )
        raise invalid("storage", table.storage, place, allowed)
    if table.admits or (table.retention is not None and table.retention.expire_after is not None):
        allowed = "Retention(capacity, eviction): HKV admits every key, and evicts by age alone"
        raise invalid("retention", table.retention, place, allowed)
    if var_type == "hbm":
        if table.capacity is not None or settings:
            given = table.capacity or dict(settings)
            raise invalid("capacity", given, place, "None: SOK's hbm tables grow")
        return {}
    found = dict(settings)
    if table.capacity is not None:
        if table.eviction != "lru":
            allowed = "'lru': HKV evicts the rows that were written longest ago"
            raise invalid("eviction", table.eviction, place, allowed)
        hkv.require_power_of_two("capacity", table.capacity, place)
        found = {"init_capacity": table.capacity, **found, "max_capacity": table.capacity}
    elif "max_capacity" not in found:
        allowed = f"a power of two; without it SOK reserves {hkv.DEFAULT_CAPACITY:,} rows"
        raise invalid("capacity", None, place, allowed)
    hkv.require_settings(found, place, are_capacities_needed=True)
    return found
