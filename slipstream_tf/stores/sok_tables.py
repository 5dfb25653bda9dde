"""Embedding tables of our own that SOK holds: what is the same however their rows are looked up.

In: the tables' settings and a rule of this package. Out: variables of SOK with an optimizer, rows,
and what checkpoints of any number of ranks, and of any kind of store, need of them.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf.config import TableConfig
from slipstream_tf.errors import invalid, require_choice
from slipstream_tf.ops.update_policy import WATCHED, UpdateCounts, UpdatePolicy
from slipstream_tf.stores import hkv
from slipstream_tf.stores.native import NativeStore
from slipstream_tf.stores.sok import SokTable, open_sok, slots_of, wrap_optimizer
from slipstream_tf.stores.sok_contents import export_rows, own_part, replace_rows
from slipstream_tf.stores.sok_rules import SLOTS, powers_of

VAR_TYPES = ("hybrid", "hbm")


class SokTables(abc.ABC):
    """Tables in variables of SOK's, spread over the ranks by key modulo their number.

    A variable of SOK starts with zeros: it holds what training added to the initial row of a key,
    which follows from the table's seed and is the same on all ranks.

    Attributes:
        tables: as given.
        optimizer: the rule of all tables.
        learning_rate: float32 scalar variable, read in every update.
        comm: the ranks, or None.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
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
        self._place = type(self).__name__
        require_choice("var_type", var_type, VAR_TYPES, self._place)
        self.tables, self.optimizer, self.comm = tuple(tables), optimizers.get(optimizer), comm
        self._settings = {t.name: _settings_of(t, var_type, settings or {}) for t in self.tables}
        self._sok = open_sok()
        ranks = 1 if comm is None else comm.size
        if ranks != self._sok.communication.num_ranks():
            allowed = f"distributed.init(): there are {self._sok.communication.num_ranks()} ranks"
            raise invalid("comm", comm, self._place, allowed)
        # Of which no row is ever made: it gives the initial rows.
        self._initial = NativeStore(
            [dataclasses.replace(t, capacity=None) for t in self.tables],
            optimizers.SGD(self.optimizer.learning_rate),
        )
        self.learning_rate = self._initial.learning_rate
        self._policies = {table.name: UpdatePolicy() for table in self.tables}
        # What was imported so far, of tables that come in parts.
        self._parts: dict[str, list[Mapping[str, Any]]] | None = None
        with tf.init_scope():
            self._tables = [self._made(table, var_type) for table in self.tables]
            self._updater = wrap_optimizer(_rule(self.optimizer, self.learning_rate))
            # Now, so that no step that is traced has to make variables.
            self._updater._create_slots([table.variable for table in self._tables])
        with tf.device("CPU:0"):
            self._steps = tf.Variable([0, 0], dtype=tf.int64, trainable=False)

    def _made(self, table: TableConfig, var_type: str) -> SokTable:
        variable = self._sok.DynamicVariable(
            dimension=table.dim,
            initializer="0.0",
            var_type=var_type,
            name=f"slipstream_{table.name}",
            # Updates happen in the backward pass, not by the model's optimizer.
            trainable=False,
            **self._settings[table.name],
        )
        return SokTable(table.name, variable, True, self._sok)

    def variable(self, table: str) -> Any:
        """Returns the `sok.DynamicVariable` of a table: what training added to initial rows."""
        return self._tables[self._index_of(table)].variable

    def _with_initial(self, index: int, keys: Any, trained: tf.Tensor) -> tf.Tensor:
        """Adds the initial rows of keys to what training added to them."""
        with tf.device("CPU:0"):
            rows, _ = self._initial.gather(self.tables[index].name, keys)
            return rows + trained

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n]: the rank that owns each key, int64 [n]."""
        return self._tables[self._index_of(table)].owners(np.asarray(keys, np.int64))

    def size(self, table: str) -> int:
        """Returns the number of rows of a table on this rank."""
        return self._tables[self._index_of(table)].size()

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows of this rank; all are found: SOK makes those that are missing."""
        index = self._index_of(table)
        keys = np.asarray(keys, np.int64)
        rows = self._with_initial(index, keys, self._tables[index].read(keys))
        return rows, tf.ones([keys.size], tf.bool)

    @abc.abstractmethod
    def update_counts(self, table: str) -> UpdateCounts:
        """See `EmbeddingStore.update_counts`."""

    def travelled(self, table: str, keys: Any) -> np.ndarray:
        """Refuses: rows are updated by SOK.

        Raises:
            ValueError: always.
        """
        del keys
        self._index_of(table)
        allowed = "another drift metric, or the native store"
        raise invalid("metric", "signal", f"table {table!r} of a {self._place}", allowed)

    def _require_unwatched(self, table: str, marks: np.ndarray) -> None:
        if (marks & WATCHED).any():
            allowed = "another drift metric than 'signal', which needs the native store"
            raise invalid("marks", "WATCHED", f"table {table!r} of a {self._place}", allowed)

    def _require_policy(self, table: str, policy: UpdatePolicy) -> None:
        place = f"table {table!r} of a {self._place}"
        if policy.decay_skipped:
            raise invalid("decay_skipped", True, place, "False: SOK keeps the moments")
        if policy.ranks > 1:
            raise invalid("simulated_ranks", policy.ranks, place, "1")

    @abc.abstractmethod
    def flush(self) -> None:
        """See `EmbeddingStore.flush`."""

    @abc.abstractmethod
    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """Returns what this rank's batches accessed of a table, of any rank's keys.

        Returns:
            "keys" int64 [n], ascending; "counts" float32 [n], decayed, above 0.
        """

    @abc.abstractmethod
    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces access counts by what `export_accesses` gave.

        Marks are lost; so are held sums where they are kept beside the counts.
        """

    def reserved_keys(self, table: str) -> tuple[int, ...]:
        """Returns the keys that SOK's table uses itself, and can have no row of."""
        return self._tables[self._index_of(table)].reserved_keys

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
            RuntimeError: deferred gradients are to be in, and one of several ranks holds some back.
        """
        index = self._index_of(table)
        found = self._tables[index]
        if flush:
            self._require_flushed(table)
        own = export_rows(found, self._slots(found))
        keys, trained = own["keys"], own["rows"]
        counts = np.zeros(keys.size, np.float32)
        if found.ranks == 1:
            counts = _counts_of(keys, self.export_accesses(table))
        return {
            "keys": keys,
            "rows": self._with_initial(index, keys, tf.constant(trained)).numpy(),
            "slots": own["slots"],
            "counts": counts,
            "last_used": np.empty(0, np.int64),
            "steps": self._steps.numpy(),
            "trained": trained,
            "powers": np.array([power.numpy() for power in self._powers()], np.float32),
        }

    def _require_flushed(self, table: str) -> None:
        pending = self.update_counts(table).pending
        if not pending or self._policies[table].is_shadow:
            return
        if self._tables[0].ranks == 1:
            self.flush()
            return
        raise RuntimeError(
            f"Rank {self._tables[0].rank} holds back {pending} gradient sums of table "
            f"{table!r}. Call flush() of the store on all ranks first."
        )

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
        index = self._index_of(table)
        if self._parts is not None:
            self._parts[table].append(contents)
            return
        found = self._tables[index]
        slots = self._slots(found)
        own = own_part(found, len(slots), contents, optional=("trained",))
        own["rows"] = self._trained(index, own)
        start = float(getattr(self.optimizer, "initial_accumulator_value", 0.0))
        replace_rows(found, slots, own, 0.0, [start] * len(slots))
        self._steps.assign(contents["steps"])
        powers = contents.get("powers")
        if powers is None or len(powers) != len(self._powers()):
            # Of a store whose optimizer counts in another way.
            powers = np.array(self._betas()) ** (int(contents["steps"][0]) + 1)
        for power, value in zip(self._powers(), powers, strict=True):
            power.assign(value)
        if found.ranks == 1:
            is_accessed = np.asarray(contents["counts"]) > 0.0
            self.import_accesses(
                table, {n: np.asarray(contents[n])[is_accessed] for n in ("keys", "counts")}
            )

    def _trained(self, index: int, own: Mapping[str, np.ndarray]) -> np.ndarray:
        """What SOK is to hold of rows, float32 [n, dim]: as it held them, or their difference."""
        keys, rows = own["keys"], np.asarray(own["rows"], np.float32)
        zeros = tf.zeros([keys.size, self.tables[index].dim])
        difference = rows - self._with_initial(index, keys, zeros).numpy()
        if "trained" not in own:
            return difference
        # Of a table of another seed or initializer the sum would be another row.
        trained = np.asarray(own["trained"], np.float32)
        sums = self._with_initial(index, keys, tf.constant(trained)).numpy()
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

    def _apply_held(self, apply: Callable[[], Any]) -> None:
        """Applies held sums as if they had come with the last update: it counts as none.

        Of before the first update they are a part of it.
        """
        powers = self._powers()
        before = [power.read_value() for power in powers]
        for power, beta in zip(powers, self._betas(), strict=True):
            last = tf.math.divide_no_nan(power, beta)
            power.assign(tf.where(self._steps[0] > 0, last, power))
        apply()
        for power, value in zip(powers, before, strict=True):
            power.assign(value)

    def _betas(self) -> list[float]:
        if isinstance(self.optimizer, optimizers.Adam):
            return [self.optimizer.beta_1, self.optimizer.beta_2]
        return []

    def _powers(self) -> list[tf.Variable]:
        """Adam's betas to the power of its updates and one: of the first beta, of the second."""
        return powers_of(self._updater)

    def _slots(self, table: SokTable) -> list[Any]:
        slots = slots_of(self._updater, table.variable)
        return [slots[name] for name in SLOTS.get(type(self.optimizer).__name__, ())]

    def _index_of(self, table: str) -> int:
        return self._initial._index_of(table)


def _counts_of(keys: np.ndarray, accesses: Mapping[str, np.ndarray]) -> np.ndarray:
    """The counts of keys, both int64 ascending, float32 [n]; 0 of those without an access."""
    counts = np.zeros(keys.size, np.float32)
    place = np.searchsorted(keys, accesses["keys"])
    is_there = np.isin(accesses["keys"], keys)
    counts[place[is_there]] = accesses["counts"][is_there]
    return counts


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks exported of a table, as one rank would have."""
    of_keys = [name for name in ("rows", "slots", "counts", "trained") if name in parts[-1]]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ("keys", *of_keys)}
    return {**parts[-1], **joined}


def _settings_of(table: TableConfig, var_type: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a table's variable, checked."""
    place = f"table {table.name!r} of SOK's"
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
        allowed = f"a power of two; without it SOK makes room for {hkv.DEFAULT_CAPACITY:,} rows"
        raise invalid("capacity", None, place, allowed)
    hkv.require_settings(found, place, are_capacities_needed=True)
    return found


def _rule(rule: optimizers.SparseOptimizer, learning_rate: tf.Variable) -> Any:
    """The optimizer of TensorFlow that has the same rule, for SOK's wrapper."""
    first = tf.compat.v1.train
    kind = type(rule)

    def rate() -> tf.Tensor:
        return learning_rate.read_value()

    if kind is optimizers.SGD:
        return first.GradientDescentOptimizer(rate)
    if isinstance(rule, optimizers.Adagrad) and kind is optimizers.Adagrad:
        start = rule.initial_accumulator_value
        # TensorFlow's rule has no epsilon: it must not matter beside what is accumulated.
        if not start > 0.0 or rule.epsilon > 1e-5 * start:
            allowed = "initial_accumulator_value > 0, and epsilon at most 1e-5 times it"
            raise invalid("optimizer", rule, "SOK's tables", allowed)
        return first.AdagradOptimizer(rate, start)
    if isinstance(rule, optimizers.Adam):
        return first.AdamOptimizer(rate, rule.beta_1, rule.beta_2, rule.epsilon)
    raise invalid("optimizer", kind.__name__, "SOK's tables", "SGD, Adagrad or Adam")
