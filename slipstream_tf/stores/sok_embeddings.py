"""Embedding tables in SOK's hash tables, behind a store's contract: lookup, update, checkpoint.

In: each rank's batches. The distinct keys of a batch go through SOK's lookup, their rows are pooled
in a native table of copies; gradients are summed, masked or held back there, and what is left goes
to the ranks that own the rows, and through `sok.OptimizerWrapper`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf import optimizers
from slipstream_tf.config import TableConfig
from slipstream_tf.errors import invalid, require_choice, require_integer
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops import update_policy
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures
from slipstream_tf.ops.update_policy import SATURATED, WATCHED, UpdateCounts, UpdatePolicy
from slipstream_tf.stores import hkv
from slipstream_tf.stores.native import NativeStore
from slipstream_tf.stores.sok import SokTable, open_sok, slots_of, wrap_optimizer

VAR_TYPES = ("hybrid", "hbm")
# Of a copy, beside its values: index entry, time of use, mark.
_COPY_OVERHEAD = 64
# Share of the copies' budget that frozen rows may take; a batch's rows need the rest.
_FROZEN_SHARE = 0.5
# Slots of an optimizer by SOK's names, in the order of a native table's.
_SLOTS = {"Adagrad": ("accumulator",), "Adam": ("m", "v")}


class SokEmbeddingStore:
    """Embedding tables whose rows SOK holds, spread over the ranks by key modulo their number.

    Every lookup (evaluation, too), update, `flush`, `freeze` and change of policy is a collective;
    ranks without inputs take part with an empty batch. Gradients are averaged over the ranks. What
    SOK sends is not in the communicator's traffic.

    A variable of SOK starts with zeros: it holds what training added to the initial row of a key,
    which follows from the table's seed. Rows as the model reads them come from `gather` and
    `export_table`. SOK makes rows for all keys that it is asked for, in evaluation, too, and does
    not tell which there were: `gather` says of every key that it was found.

    HKV tables ("hybrid") that are full evict the rows that were written longest ago: masked rows
    and their slots are written once a window, as they are.

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
        comm: Any = None,
        var_type: str = "hybrid",
        settings: Mapping[str, Any] | None = None,
        cache_bytes: int = 256 << 20,
    ):
        """Makes empty tables.

        Args:
            tables: at least one, of distinct names. With "hybrid": `capacity`, a power of two, is
                that of each rank's part, and `eviction` "lru".
            optimizer: the rule of all tables: `SGD`, `Adagrad` or `Adam`.
            comm: the ranks, from `distributed.init()`; None: this process alone.
            var_type: "hybrid" (HierarchicalKV: GPU and host memory) or "hbm" (GPU memory only).
            settings: of HKV, for all tables; see `stores.hkv.NAMES`.
            cache_bytes: of the copies on this rank; must hold the distinct keys of a batch. Frozen
                copies take at most half of it.

        Raises:
            ImportError: SOK cannot be loaded here.
            ValueError: a table or setting that SOK cannot have, or a rule that it does not know.
        """
        require_choice("var_type", var_type, VAR_TYPES, "SokEmbeddingStore")
        require_integer("cache_bytes", cache_bytes, 1, None, "SokEmbeddingStore")
        self.tables, self.optimizer, self.comm = tuple(tables), optimizers.get(optimizer), comm
        self._settings = {t.name: _settings_of(t, var_type, settings or {}) for t in self.tables}
        self._sok = open_sok()
        talk = self._sok.communication
        ranks = 1 if comm is None else comm.size
        if ranks != talk.num_ranks():
            allowed = f"distributed.init(): there are {talk.num_ranks()} ranks"
            raise invalid("comm", comm, "SokEmbeddingStore", allowed)
        row_bytes = sum(4 * table.dim + _COPY_OVERHEAD for table in self.tables)
        rows = cache_bytes // max(row_bytes, 1)
        if rows < 2:
            raise invalid("cache_bytes", cache_bytes, "SokEmbeddingStore", f"{2 * row_bytes}")
        self._most_frozen = int(rows * _FROZEN_SHARE)
        self._frozen = {table.name: 0 for table in self.tables}
        # Gradients pass through the copies' tables, but rows are not updated there.
        self._copies = NativeStore(
            [dataclasses.replace(t, capacity=rows, eviction="lru") for t in self.tables],
            optimizers.SGD(self.optimizer.learning_rate),
        )
        self._handles = self._copies._handles
        self.learning_rate = self._copies.learning_rate
        self._policies = {table.name: UpdatePolicy() for table in self.tables}
        self._marked = {table.name: np.empty(0, np.int64) for table in self.tables}
        with tf.init_scope():
            self._initial = [
                table_ops.create(dataclasses.replace(t, capacity=None), optimizers.SGD())
                for t in self.tables
            ]
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

    def lookup(
        self,
        packed: PackedFeatures,
        specs: Sequence[FeatureSpec],
        training: bool,
        stacked: bool = False,
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """See `EmbeddingStore.lookup`; a collective."""
        feature_table = [self._index_of(spec.table) for spec in specs]
        # Keys with a frozen copy are left out: they never enter SOK's exchange.
        sizes, keys = exchange_ops.route_keys(
            self._handles, packed, feature_table, ranks=1, reads_frozen=training
        )
        parts = tf.split(keys, sizes[0], num=len(self.tables))
        fetched = [
            self._with_initial(i, part, self._tables[i].lookup(part))
            for i, part in enumerate(parts)
        ]
        rows = exchange_ops.RowParcels(sizes, keys, exchange_ops.pack_rows(fetched))
        stored = exchange_ops.store_copies(
            self._handles, rows, with_summary=False, makes_room=not training
        )
        with tf.control_dependencies([] if stored is None else [stored]):
            return self._copies.lookup(packed, specs, training, stacked)

    def _with_initial(self, index: int, keys: Any, trained: tf.Tensor) -> tf.Tensor:
        """Adds the initial rows of keys to what training added to them."""
        with tf.device("CPU:0"):
            rows, _ = table_ops.gather(self._initial[index], keys, self.tables[index].dim)
            return rows + trained

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """See `EmbeddingStore.apply_gradients`; averages over the ranks. A collective."""
        ranks = self._tables[0].ranks
        # SOK adds up what the ranks send.
        shares = [gradient / ranks for gradient in gradients]
        collected = exchange_ops.collect_gradients(
            plan, shares, self.learning_rate, counts_update=True
        )
        self._steps.assign_add([1, 1])
        return self._deliver(collected)

    def _deliver(self, collected: exchange_ops.RowParcels) -> tf.Operation | None:
        """Sends rows of gradients to the ranks that own their keys, which apply them."""
        sizes = collected.sizes[0]
        dims = [table.dim for table in self.tables]
        keys = tf.split(collected.keys, sizes, num=len(dims))
        values = tf.split(collected.values, sizes * dims, num=len(dims))
        pairs = []
        for table, dim, own_keys, own_values in zip(self._tables, dims, keys, values, strict=True):
            rows = tf.reshape(own_values, [-1, dim])
            pairs.append((self._to_owners(table, own_keys, rows), table.variable))
        return self._updater.apply_gradients(pairs)

    def _to_owners(self, table: SokTable, keys: tf.Tensor, rows: tf.Tensor) -> tf.IndexedSlices:
        """What the backward pass of SOK's lookup does, for keys that are not those of a lookup."""
        ops, talk = self._sok.raw_ops, self._sok.communication
        selected, order, splits = ops.dist_select(keys, num_splits=table.ranks)
        own_keys, _ = talk.alltoall(selected, splits)
        own_rows, _ = talk.alltoall(ops.gather_ex(rows, order), splits)
        shape = tf.stack([tf.shape(own_keys)[0], table.dim])
        return tf.IndexedSlices(own_rows, own_keys, shape)

    def flush(self) -> None:
        """Sends and applies all deferred gradients of all ranks; a collective."""
        self._deliver(exchange_ops.collect_held(self._handles))

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """See `EmbeddingStore.set_update_policy`; a collective if sums may be held.

        Raises:
            ValueError: gradients are to be deferred by movement under a rule with slots, which are
                the owner's; or moments are to decay, or ranks to be simulated.
        """
        index = self._index_of(table)
        place = f"table {table!r} of a SokEmbeddingStore"
        by_movement = policy.mode == "defer" and policy.trigger == "movement"
        if by_movement and not isinstance(self.optimizer, optimizers.SGD):
            allowed = "'interval'; how far a sum moves a row is known under SGD only"
            raise invalid("defer_trigger", "movement", place, allowed)
        if policy.decay_skipped:
            raise invalid("decay_skipped", True, place, "False: SOK keeps the moments")
        if policy.ranks > 1:
            raise invalid("simulated_ranks", policy.ranks, place, "1")
        policy = dataclasses.replace(policy, is_exchanged=True)
        before = self._policies[table]
        if before.mode == "defer" and _kind_of(before) != _kind_of(policy):
            self.flush()
        update_policy.set_policy(self._handles[index], policy)
        self._policies[table] = policy

    def mark_rows(self, table: str, keys: Any, marks: Any) -> None:
        """See `EmbeddingStore.mark_rows`; ends what is frozen of the table.

        Raises:
            ValueError: a mark is WATCHED: rows are updated by SOK.
        """
        index = self._index_of(table)
        keys, marks = np.asarray(keys, np.int64), np.asarray(marks, np.uint8)
        if (marks & WATCHED).any():
            place = f"table {table!r} of a SokEmbeddingStore"
            allowed = "another drift metric than 'signal', which needs the native store"
            raise invalid("marks", "WATCHED", place, allowed)
        withheld = keys[(marks & SATURATED) > 0]
        if withheld.size > self._most_frozen:
            logging.warning(
                "%d of %d saturated keys of table %r are not withheld: cache_bytes has no room for "
                "their marks.",
                withheld.size - self._most_frozen,
                withheld.size,
                table,
            )
            withheld = withheld[: self._most_frozen]
        # Copies may come later in the window: what is to be withheld then is marked now.
        of_copies = np.full(withheld.size, SATURATED)
        update_policy.mark_rows(self._handles[index], withheld, of_copies, makes_rows=True)
        found = self._tables[index]
        own = found.own(withheld)
        slots = slots_of(self._updater, found.variable).values()
        found.touch(np.union1d(self._marked[table], own), slots)
        self._marked[table] = own
        self._frozen[table] = 0

    def freeze(self, hot: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Gives every rank copies of rows that it reads without asking until `mark_rows`.

        A collective; call it on all ranks alike, after `mark_rows`. See `ShardedStore.freeze`.

        Args:
            hot: table -> keys int64 [n] and access counts float32 [n] over all ranks, by count
                descending; tables not named freeze nothing.
        """
        if self.comm is None or self.comm.size == 1:
            return
        nothing = np.empty(0, np.int64), np.empty(0, np.float32)
        for index, (table, found) in enumerate(zip(self.tables, self._tables, strict=True)):
            keys, counts = hot.get(table.name, nothing)
            keys = keys[: self._most_frozen][counts[: self._most_frozen] >= self.least_accesses]
            self._frozen[table.name] = keys.size
            own = found.own(keys)
            name = f"slipstream.sok.frozen.{table.name}"
            everyones = self.comm.gather(tf.constant(own, tf.int64), "keys", f"{name}.keys")
            trained = self.comm.gather(found.read(own), "rows", f"{name}.rows")
            rows = self._with_initial(index, everyones, trained)
            size = tf.reshape(tf.size(everyones, tf.int64), [1, 1])
            exchange_ops.store_copies(
                self._handles[index : index + 1],
                exchange_ops.RowParcels(size, everyones, exchange_ops.pack_rows([rows])),
                with_summary=False,
                frozen=True,
                makes_room=True,
            )

    @property
    def least_accesses(self) -> float:
        """Decayed accesses from which a copy on every rank is less to send than single rows."""
        return 2.0 * self._tables[0].ranks

    def frozen_keys(self, table: str) -> int:
        """Returns how many keys of a table have frozen copies in this window."""
        self._index_of(table)
        return self._frozen[table]

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

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `EmbeddingStore.hot_keys`; of this rank's own batches."""
        return self._copies.hot_keys(table, k)

    def decay_counts(self, factor: float) -> None:
        """See `EmbeddingStore.decay_counts`."""
        self._copies.decay_counts(factor)

    def travelled(self, table: str, keys: Any) -> np.ndarray:
        """Refuses: rows are updated by SOK.

        Raises:
            ValueError: always.
        """
        del keys
        self._index_of(table)
        place = f"table {table!r} of a SokEmbeddingStore"
        raise invalid("metric", "signal", place, "another drift metric, or the native store")

    def update_counts(self, table: str) -> UpdateCounts:
        """See `EmbeddingStore.update_counts`; of this rank's gradient rows."""
        return self._copies.update_counts(table)

    def export_table(self, table: str) -> dict[str, np.ndarray]:
        """See `EmbeddingStore.export_table`; of the rows on this rank.

        Returns:
            The arrays of `ops.table.export_table`, from which a native table can be made, too;
            "trained", float32 [n, dim], the rows as SOK has them; "powers", float32, what Adam's
            bias correction goes by. Access counts are 0.

        Raises:
            RuntimeError: this rank holds sums back.
        """
        index = self._index_of(table)
        pending = self.update_counts(table).pending
        if pending and not self._policies[table].is_shadow:
            raise RuntimeError(
                f"Rank {self._tables[0].rank} holds back {pending} gradient sums of table "
                f"{table!r}. Call flush() of the store on all ranks first."
            )
        found = self._tables[index]
        keys, trained = (part.numpy() for part in self._sok.export(found.variable))
        order = np.argsort(keys)
        keys, trained = keys[order], trained[order]
        slots = [slot.sparse_read(tf.constant(keys)).numpy() for slot in self._slots(found)]
        return {
            "keys": keys,
            "rows": self._with_initial(index, keys, tf.constant(trained)).numpy(),
            "slots": np.concatenate([np.empty((keys.size, 0), np.float32), *slots], axis=1),
            "counts": np.zeros(keys.size, np.float32),
            "last_used": np.empty(0, np.int64),
            "steps": self._steps.numpy(),
            "trained": trained,
            "powers": np.array([power.numpy() for power in self._powers()], np.float32),
        }

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces all of a table by what `export_table` gave, of any ranks; all or nothing.

        Args:
            table: name of the table.
            contents: keys that other ranks own are passed over; of a native table's, "trained" and
                "powers" are missing.

        Raises:
            ValueError: an array is missing, or of another shape.
            RuntimeError: the table has other keys already; SOK cannot take them out.
        """
        index = self._index_of(table)
        found = self._tables[index]
        keys = np.asarray(contents["keys"], np.int64)
        slots = self._slots(found)
        width = len(slots) * found.dim
        if contents["slots"].shape != (keys.size, width):
            allowed = f"float32 [{keys.size}, {width}]"
            raise invalid("slots", list(contents["slots"].shape), f"table {table!r}", allowed)
        is_own = found.owners(keys) == found.rank
        keys = keys[is_own]
        present, _ = self._sok.export(found.variable)
        others = np.setdiff1d(present.numpy(), keys)
        if others.size:
            raise RuntimeError(
                f"Table {table!r} has {others.size} keys that are not to be loaded, such as "
                f"{others[0]}, and SOK cannot take keys out. Load into a new store."
            )
        trained = contents.get("trained")
        if trained is None:
            zeros = tf.zeros([keys.size, found.dim])
            trained = contents["rows"][is_own] - self._with_initial(index, keys, zeros).numpy()
        else:
            trained = trained[is_own]
        self._sok.assign(found.variable, tf.constant(keys), tf.constant(trained))
        for slot, values in zip(
            slots, np.split(contents["slots"], len(slots) or 1, 1), strict=False
        ):
            self._sok.assign(slot, tf.constant(keys), tf.constant(values[is_own]))
        self._steps.assign(contents["steps"])
        powers = contents.get("powers")
        if powers is None and isinstance(self.optimizer, optimizers.Adam):
            betas = np.array([self.optimizer.beta_1, self.optimizer.beta_2])
            powers = betas ** (int(contents["steps"][0]) + 1)
        for power, value in zip(self._powers(), () if powers is None else powers, strict=False):
            power.assign(value)

    def _powers(self) -> list[tf.Variable]:
        """Adam's betas to the power of its updates and one: of the first beta, of the second."""
        by_name = sorted(self._updater._non_slot_dict.items(), key=lambda item: item[0][0])
        return [power for _, power in by_name]

    def _slots(self, table: SokTable) -> list[Any]:
        slots = slots_of(self._updater, table.variable)
        return [slots[name] for name in _SLOTS.get(type(self.optimizer).__name__, ())]

    def _index_of(self, table: str) -> int:
        return self._copies._index_of(table)


def _kind_of(policy: UpdatePolicy) -> tuple[Any, ...]:
    """What sums that are held depend on."""
    return policy.mode, policy.trigger, policy.is_shadow


def _settings_of(table: TableConfig, var_type: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a table's variable, checked."""
    place = f"table {table.name!r} of a SokEmbeddingStore"
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
