"""The SOK store: watches variables of NVIDIA's Sparse Operation Kit in a loop that exists already.

Lookups and optimizers stay the user's own. In: the keys of batches, and gradients on their way to
the optimizer. Out: access counts and hot rows for the saturation engine, and the gradients that are
to be applied.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.config import TableConfig
from slipstream_tf.errors import invalid, require_integer
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures, pack
from slipstream_tf.ops.mask import KeySet, mask_gradients
from slipstream_tf.ops.update_policy import SATURATED, WATCHED, UpdateCounts, UpdatePolicy
from slipstream_tf.stores import sok_movement, sok_traffic
from slipstream_tf.stores.access_counts import AccessCounts, EstimatedCounts, ExactCounts
from slipstream_tf.stores.frozen_rows import FrozenRows
from slipstream_tf.stores.held_sums import HeldSums
from slipstream_tf.stores.sok import SokTable, open_table, slots_of, wrap_optimizer
from slipstream_tf.stores.sok_contents import export_rows, own_part, replace_rows
from slipstream_tf.stores.sok_rules import SlotLayout, UserRule
from slipstream_tf.stores.unchanged_keys import UnchangedKeys

# Sums that there is room for at first, in a table of few rows; more as it grows.
_FEWEST_SUMS = 1 << 16


class SokStore:
    """Watches SOK's variables for saturation; it owns no rows and looks none up.

    For a training loop that exists already, three calls: `observe` the keys of a batch before (or
    after) its lookup, `withhold` gradients on their way to the optimizer, and `step` of the
    `Slipstream` that the store was given to:

        store = SokStore({"user": user_variable}, optimizer, distributed.init())
        slipstream = Slipstream(store, config)
        for keys, labels in data:
            with tf.GradientTape() as tape:
                rows = sok.all2all_dense_embedding(user_variable, keys)
                ...
            slipstream.observe({"user": keys})
            gradients = tape.gradient(loss, [user_variable])
            optimizer.apply_gradients(store.withhold(zip(gradients, [user_variable])))
            slipstream.step()

    A key belongs to the rank that SOK puts its row on; there, gradients come in summed over the
    ranks, and are masked or held back. That saves the update, not what travelled before:
    `lookup_sparse` sends as much for any keys. Keys are counted on the rank that looked them up.

    `lookup`, in place of `sok.all2all_dense_embedding`, saves the exchange, too: while gradients of
    saturated keys are masked, every rank reads the most accessed of those keys' rows from copies of
    its own, which are made anew at each window's end.

    Gradients are held back by interval under any optimizer; by movement where `optimizer` is given
    and is one of `sok_movement.KNOWN`: its slots then are made with the store, and those of a key
    when its first gradient comes. `flush` applies what is held at the end.

    An HKV table that is full evicts the rows that were written longest ago, and those of masked
    keys are not written: they are, with their slots (give `optimizer`), once a window. Those writes
    show in `sok.incremental_model_dump`; `sok_files.written_since` knows most of them. A row that
    was evicted all the same starts anew when it is read; SOK does not tell, and `gather` says of
    every key that it was found.

    What `lookup` has SOK send is in the communicator's traffic; what the loop itself sends through
    `sok` is not.

    Access counts are exact, in host memory, and those of at most `counted_keys` keys of a table, of
    which the least accessed makes room for a new one. With `counts_on_device` they are estimates of
    all keys, made on the table's device; see `ops.hot_keys.HotKeySketch`.

    Attributes:
        tables: one per variable, in the order given.
        optimizer: as given.
        comm: as given.
    """

    def __init__(
        self,
        variables: Any,
        optimizer: Any = None,
        comm: Any = None,
        counted_keys: int = 1 << 20,
        frozen_bytes: int = 128 << 20,
        counts_on_device: bool = False,
    ):
        """Starts with counts of zero and no saturated key.

        Args:
            variables: table name -> `sok.DynamicVariable` or `sok.Variable`; or one variable, whose
                name the table gets.
            optimizer: that updates them, as `wrap_optimizer` or `sok.OptimizerWrapper` made it:
                slots of masked keys are kept from eviction, and sums may be held by movement. None:
                slots are left alone.
            comm: the ranks that SOK spreads its rows over, from `distributed.init()`; None: this
                process alone.
            counted_keys: keys of a table whose accesses are counted; at least those of a batch.
            frozen_bytes: of a table's rows that `lookup` reads from copies.
            counts_on_device: whether accesses are estimated where the table is, in 96 bytes for
                each of `counted_keys` (rounded up to a power of two).

        Raises:
            ImportError: SOK cannot be loaded here.
            ValueError: no variable, one of another kind or with settings that SOK would misread;
                an optimizer that SOK cannot use; or other ranks than SOK's.
        """
        require_integer("counted_keys", counted_keys, 1, None, "SokStore")
        if optimizer is not None:
            self._require_optimizer(optimizer)
        self.optimizer, self.comm = optimizer, comm
        self._tables = {name: open_table(name, v) for name, v in _named(variables).items()}
        ranks = {table.ranks for table in self._tables.values()}
        if ranks != {1 if comm is None else comm.size}:
            allowed = f"distributed.init(): SOK has {max(ranks)} ranks"
            raise invalid("comm", comm, "SokStore", allowed)
        require_integer("frozen_bytes", frozen_bytes, 0, None, "SokStore")
        self._frozen_bytes = frozen_bytes
        self._table_of = {id(table.variable): table for table in self._tables.values()}
        self.tables = tuple(TableConfig(name, dim=t.dim) for name, t in self._tables.items())
        self._counter: AccessCounts
        if counts_on_device:
            devices = {name: table.variable.device for name, table in self._tables.items()}
            self._counter = EstimatedCounts(devices, counted_keys)
        else:
            self._counter = ExactCounts(self._tables, counted_keys)
        self._policies = dict.fromkeys(self._tables, UpdatePolicy("mask"))
        self._marked = dict.fromkeys(self._tables, np.empty(0, np.int64))
        self._unchanged = {name: UnchangedKeys() for name in self._tables}
        self._masked: dict[str, KeySet] = {}
        self._nothing: dict[str, KeySet] = {}
        self._held: dict[str, HeldSums] = {}
        self._frozen: dict[str, FrozenRows] = {}
        for name, table in self._tables.items():
            device = table.variable.device
            self._masked[name], self._nothing[name] = KeySet(device), KeySet(device)
            num_keys = None if table.is_dynamic else table.size()
            self._held[name] = HeldSums(table.dim, device, num_keys)
            self._frozen[name] = FrozenRows(table.dim, device)
        self._rule = UserRule(optimizer)
        self._unknown_movement = sok_movement.unknown_optimizer(optimizer)
        if self._unknown_movement is None:
            dynamic = [t.variable for t in self._tables.values() if t.is_dynamic]
            sok_movement.prepare(optimizer, dynamic)
        # Tables that `lookup` was asked for: copies are made of no others.
        self._served: set[str] = set()
        with tf.device("CPU:0"):
            self._is_shadow = {name: _flag() for name in self._tables}
            self._offered = {name: _row_count() for name in self._tables}
            self._masked_rows = {name: _row_count() for name in self._tables}

    def _require_optimizer(self, optimizer: Any) -> None:
        if wrap_optimizer(optimizer) is not optimizer:
            kind = type(optimizer).__name__
            allowed = f"stores.sok.wrap_optimizer({kind}(...)), which updates the variables, too"
            raise invalid("optimizer", kind, "SokStore", allowed)

    @property
    def opened(self) -> tuple[SokTable, ...]:
        """The watched variables, in the order of `tables`."""
        return tuple(self._tables.values())

    def observe(self, table: str, keys: Any) -> None:
        """Counts the accesses of a batch; every occurrence of a key counts.

        Args:
            table: name of the table.
            keys: int64 (or int32), a tensor of any shape or a RaggedTensor; -1 is padding.
        """
        name = self._require(table).name
        if isinstance(keys, tf.RaggedTensor):
            keys = keys.flat_values
        elif isinstance(keys, tf.SparseTensor):
            keys = keys.values
        # A column: -1 is padding in matrices only.
        column = tf.reshape(tf.cast(keys, tf.int64), [-1, 1])
        specs = [FeatureSpec(name, name)]
        self.count_accesses(pack({name: column}, specs), specs)

    def count_accesses(self, packed: PackedFeatures, specs: Sequence[FeatureSpec]) -> None:
        """Counts the accesses of a batch of several features; `Slipstream.observe` does so.

        Args:
            packed: the keys, from `features.pack` with the same specs.
            specs: the features, in order.
        """
        self._counter.count(packed, specs)

    def withhold(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Masks or holds back gradients of watched variables; call it before the optimizer.

        Args:
            grads_and_vars: pairs of gradient and variable. Those of other variables, and gradients
                of None, are returned as they are.

        Returns:
            The pairs, in their order.
        """
        return [
            (gradient, variable)
            if gradient is None or id(variable) not in self._table_of
            else (self.mask_gradients(self._table_of[id(variable)].name, gradient), variable)
            for gradient, variable in grads_and_vars
        ]

    def mask_gradients(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums the rows of each key, and masks or holds back those of saturated keys.

        Args:
            table: name of the table.
            gradients: of the table's variable, as SOK gave them: indices of this rank's own rows.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`: what is to be
            applied now, held sums that are due included.

        Raises:
            ValueError: there is no such table.
            TypeError: these are no sparse gradients.
        """
        found = self._require(table)
        # What came from other ranks has no shape in a graph.
        gradients = tf.IndexedSlices(
            tf.ensure_shape(gradients.values, [None, found.dim]),
            tf.ensure_shape(gradients.indices, [None]),
            gradients.dense_shape,
        )
        result = mask_gradients(gradients, self._masked[table])
        with tf.device("CPU:0"):
            self._offered[table].assign_add(result.offered)
            self._masked_rows[table].assign_add(result.masked)
        # Conditions are tensors': the policy may change without retracing.
        kept = tf.cond(
            self._is_shadow[table],
            lambda: _parts(mask_gradients(gradients, self._nothing[table]).slices),
            lambda: _parts(result.slices),
        )
        slices = tf.IndexedSlices(kept[1], kept[0], gradients.dense_shape)
        held = self._held[table]
        indices, values = tf.cond(
            held.is_active,
            lambda: _parts(held.take(slices, self._movement_of(found))),
            lambda: kept,
        )
        return tf.IndexedSlices(values, indices, gradients.dense_shape)

    def _movement_of(self, table: SokTable) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        if self._unknown_movement is not None or not table.is_dynamic:
            return _never
        return functools.partial(sok_movement.movement, self.optimizer, table.variable)

    def lookup(self, table: str, keys: tf.Tensor) -> tf.Tensor:
        """Looks up rows through SOK, but for those that this rank has a copy of; a collective.

        Args:
            table: name of the table.
            keys: int64 [n].

        Returns:
            float32 [n, dim], as `sok.all2all_dense_embedding` gives them. No gradient flows to
            copies.
        """
        found = self._require(table)
        self._served.add(table)
        return self._frozen[table].serve(keys, lambda k: sok_traffic.lookup(self.comm, found, k))

    def freeze(self, hot: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Gives every rank copies of rows that `lookup` reads until `mark_rows`; a collective.

        Rows are copied while their gradients are masked, and where `lookup` is used.

        Args:
            hot: table -> keys int64 [n] and access counts float32 [n] over all ranks, by count
                descending; tables not named freeze nothing.
        """
        if self.comm is None or self.comm.size == 1:
            return
        for name, found in self._tables.items():
            if name not in hot or name not in self._served or not self._masks(name):
                continue
            keys, counts = hot[name]
            most = self._frozen_bytes // (4 * found.dim)
            keys = keys[:most][counts[:most] >= self.least_accesses]
            own = found.own(keys)
            what = f"slipstream.sok.frozen.{name}"
            everyones = self.comm.gather(tf.constant(own, tf.int64), "keys", f"{what}.keys")
            rows = self.comm.gather(found.read(own), "rows", f"{what}.rows")
            self._frozen[name].assign(everyones.numpy(), rows.numpy())

    @property
    def least_accesses(self) -> float:
        """Decayed accesses from which a copy on every rank is less to send than single rows."""
        return 2.0 * (1 if self.comm is None else self.comm.size)

    def frozen_keys(self, table: str) -> int:
        """Returns how many keys of a table have copies in this window."""
        return self._frozen[self._require(table).name].size

    def flush(self, optimizer: Any = None) -> None:
        """Applies all held sums, as one more update of the optimizer; no collective.

        Args:
            optimizer: that updates the variables; None: the store's.

        Raises:
            ValueError: there is none.
        """
        optimizer = optimizer or self.optimizer
        if optimizer is None:
            raise invalid("optimizer", None, "SokStore.flush", "the one of the training loop")
        pairs = []
        for name, found in self._tables.items():
            self._held[name].let_go()
            empty, shape = tf.zeros([0, found.dim]), tf.constant([0, found.dim])
            nothing = tf.IndexedSlices(empty, tf.zeros([0], tf.int64), shape)
            pairs.append((self.mask_gradients(name, nothing), found.variable))
        optimizer.apply_gradients(pairs)

    def mark_rows(self, table: str, keys: Any, marks: Any) -> None:
        """Replaces the saturated keys of a table by those marked so; see `TrackedStore.mark_rows`.

        Ends what is frozen of the table.

        Raises:
            ValueError: a mark is WATCHED: the store does not see updates, so that the drift metric
                "signal" needs another store.
        """
        marks = np.asarray(marks, np.uint8)
        if (marks & WATCHED).any():
            allowed = "another drift metric than 'signal', which needs the native store"
            raise invalid("marks", "WATCHED", f"table {table!r} of a SokStore", allowed)
        found = self._require(table)
        before = self._marked[table]
        own = found.own(np.asarray(keys, np.int64)[(marks & SATURATED) > 0])
        self._marked[table] = own
        # Of the window that ends, too: keys that are let go would else be evicted before they are
        # written again.
        found.touch(np.union1d(before, own), slots_of(self.optimizer, found.variable).values())
        self._frozen[table].assign(np.empty(0, np.int64), np.empty((0, found.dim), np.float32))
        self._apply_policy(table)
        # Sums that were held under another policy leave with the next step.
        if self._masks(table) and not self._held[table].pending():
            self._unchanged[table].replace(np.unique(own), time.time())
        else:
            self._unchanged[table].forget()

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Says whether gradients of saturated keys are masked or held, from the next step on.

        Raises:
            ValueError: gradients are to be deferred by movement, and nobody knows how far the
                optimizer would move the rows; or moments are to decay, or ranks to be simulated:
                the optimizer is not the store's.
        """
        found = self._require(table)
        place = f"table {table!r} of a SokStore"
        if policy.mode == "defer" and policy.trigger == "movement":
            if self._unknown_movement is not None:
                allowed = (
                    f"'interval', or a store with one of these optimizers: {sok_movement.KNOWN}; "
                    f"it has {self._unknown_movement}"
                )
                raise invalid("defer_trigger", "movement", place, allowed)
            if not found.is_dynamic:
                allowed = "'interval': SOK's optimizers update its dynamic variables only"
                raise invalid("defer_trigger", "movement", place, allowed)
        if policy.decay_skipped:
            raise invalid("decay_skipped", True, place, "False: the optimizer is not the store's")
        if policy.ranks > 1:
            raise invalid("simulated_ranks", policy.ranks, place, "1")
        masked = self._masks(table)
        self._policies[table] = policy
        if not (masked and self._masks(table)):
            self._unchanged[table].forget()
        self._apply_policy(table)

    def _apply_policy(self, table: str) -> None:
        policy, found = self._policies[table], self._tables[table]
        marked = found.indices(self._marked[table])
        masks = policy.mode == "mask"
        self._masked[table].assign(marked if masks else marked[:0])
        self._is_shadow[table].assign(policy.is_shadow and masks)
        # All the sums that fit the budget would take its memory at once.
        most = min(policy.max_rows, max(2 * found.size(), _FEWEST_SUMS))
        self._held[table].configure(dataclasses.replace(policy, max_rows=most), marked)

    def _masks(self, table: str) -> bool:
        policy = self._policies[table]
        return policy.mode == "mask" and not policy.is_shadow

    def unchanged_since(self, table: str, moment: float) -> np.ndarray:
        """Returns int64 [n]: keys of this rank whose gradients have been masked since a time.

        Their rows were written since, once a window, but as they are.

        Args:
            table: name of the table.
            moment: in seconds since 1970.
        """
        return self._unchanged[self._require(table).name].since(moment)

    def travelled(self, table: str, keys: Any) -> np.ndarray:
        """Refuses: the store does not see updates.

        Raises:
            ValueError: always.
        """
        del keys
        place = f"table {self._require(table).name!r} of a SokStore"
        raise invalid("metric", "signal", place, "another drift metric, or the native store")

    def update_counts(self, table: str) -> UpdateCounts:
        """Returns what became, or in shadow mode would have become, of a table's gradient rows."""
        self._require(table)
        offered, masked = int(self._offered[table]), int(self._masked_rows[table])
        held = self._held[table]
        counts = held.counts()
        return UpdateCounts(
            offered=offered,
            sent=offered - masked - counts.held + counts.left_alone,
            masked=masked,
            held=counts.held,
            due_by_movement=counts.due_by_movement,
            due_by_age=counts.due_by_age,
            flushed=counts.flushed,
            refused=counts.refused,
            pending=held.pending(),
            pending_bytes=held.buffer_bytes(),
        )

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n]: the rank that SOK puts each key, int64 [n], on."""
        return self._require(table).owners(np.asarray(keys, np.int64))

    def size(self, table: str) -> int:
        """Returns the number of rows of a table on this rank."""
        return self._require(table).size()

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows of this rank.

        Args:
            table: name of the table.
            keys: int64 [n], keys that this rank owns.

        Returns:
            rows float32 [n, dim] and found bool [n], all true: SOK makes a row that is missing.
        """
        found = self._require(table)
        keys = np.asarray(keys, np.int64)
        return found.read(keys), tf.ones([keys.size], tf.bool)

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `TrackedStore.hot_keys`; of this rank's own batches."""
        return self._counter.hot_keys(self._require(table).name, k)

    def decay_counts(self, factor: float) -> None:
        """Multiplies the access counts of all tables by `factor`, 0 to 1."""
        self._counter.decay(factor)

    def reserved_keys(self, table: str) -> tuple[int, ...]:
        """Returns the keys that SOK's table uses itself, and can have no row of."""
        return self._require(table).reserved_keys

    def num_keys(self, table: str) -> int | None:
        """Returns how many keys, from 0, a table has on all ranks; None: any number of any."""
        return self._require(table).num_keys

    def slot_layout(self, table: str) -> SlotLayout:
        """Returns whose slots the rows of a table have, and how they start."""
        return self._rule.layout(self._require(table))

    def export_table(self, table: str, flush: bool = False) -> dict[str, np.ndarray]:
        """Returns this rank's rows, with the optimizer's slots of dynamic variables.

        Args:
            table: name of the table.
            flush: must be false: what is held back is not in; `flush` of the store applies it.

        Returns:
            The arrays of `ops.table.export_table`, with counts of 0 (`export_accesses` has them);
            and "powers", float32, what Adam's bias correction goes by.

        Raises:
            ValueError: `flush` is true.
        """
        found = self._require(table)
        if flush:
            place = f"export_table of table {table!r} of a SokStore"
            raise invalid("flush", True, place, "False; SokStore.flush applies sums")
        contents = export_rows(found, self._rule.slots(found))
        return {
            **contents,
            "counts": np.zeros(contents["keys"].size, np.float32),
            "last_used": np.empty(0, np.int64),
            **self._rule.export(),
        }

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces this rank's rows and slots by what `export_table` of any store gave.

        SOK cannot take keys out: those that a dynamic variable has and the contents do not start
        anew, if its initializer is a number; else they stay. Those of a `sok.Variable` stay.

        Args:
            table: name of the table.
            contents: keys that other ranks own are passed over.

        Raises:
            ValueError: an array is of another shape, or a key is one that SOK uses. Nothing is
                changed then.
            RuntimeError: the table had no room, and SOK evicted rows of the contents.
        """
        found = self._require(table)
        slots = self._rule.slots(found)
        own = own_part(found, len(slots), contents)
        replace_rows(found, slots, own, found.initial_value, self._rule.initial_slots())
        self._rule.replace(contents)

    @property
    def holds_at_owners(self) -> bool:
        """Whether a rank holds sums of its own rows only."""
        return True

    def export_pending(self, table: str) -> dict[str, np.ndarray]:
        """Returns the gradient sums that this rank holds back, of its own rows; they stay.

        As `ops.pending` describes them, with a learning rate of 0 where the store does not know
        that of the optimizer; and "is_leaving", a bool: whether they all leave with the next step.
        """
        found = self._require(table)
        is_known = self._unknown_movement is None
        held = self._held[table]
        indices, ages, sums = held.export()
        return {
            "keys": found.keys_of(indices),
            "ages": ages,
            "ranks": np.zeros(indices.size, np.int32),
            "sums": sums,
            "learning_rate": np.float32(
                sok_movement.learning_rate(self.optimizer) if is_known else 0.0
            ),
            "is_leaving": np.bool_(held.is_leaving),
        }

    def import_pending(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the gradient sums that are held back; those of one key are added up.

        Args:
            table: name of the table.
            contents: as `export_pending` gave them; keys that other ranks own are passed over.

        Raises:
            RuntimeError: there are some, but the policy defers nothing.
        """
        found = self._require(table)
        is_own = found.owners(contents["keys"]) == found.rank
        keys, ages, sums = (contents[name][is_own] for name in ("keys", "ages", "sums"))
        self._held[table].replace(found.indices(keys), ages, sums)

    def let_go_of(self, table: str) -> None:
        """Makes all sums that a table holds leave with the next step, whatever the policy."""
        self._held[self._require(table).name].let_go_of_all()

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """Returns what this rank's batches accessed of a table, of any rank's keys.

        Returns:
            "keys" int64 [n], ascending; "counts" float32 [n], decayed, above 0.
        """
        return self._counter.export(self._require(table).name)

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces access counts by what `export_accesses` gave; estimated ones start anew."""
        self._counter.replace(self._require(table).name, accesses)

    def _require(self, table: str) -> SokTable:
        if table not in self._tables:
            names = ", ".join(map(repr, self._tables))
            raise invalid("table", table, "a store", f"one of {names}")
        return self._tables[table]


def _named(variables: Any) -> dict[str, Any]:
    if not isinstance(variables, Mapping):
        name = getattr(variables, "name", None)
        if not isinstance(name, str):
            kind = type(variables).__name__
            allowed = "a sok.DynamicVariable, a sok.Variable, or a dictionary of them by table name"
            raise invalid("variables", kind, "SokStore", allowed)
        return {name.split(":")[0]: variables}
    if not variables:
        raise invalid("variables", variables, "SokStore", "one variable or more")
    return dict(variables)


def _flag() -> tf.Variable:
    return tf.Variable(False, trainable=False)


def _row_count() -> tf.Variable:
    return tf.Variable(0, trainable=False, dtype=tf.int64)


def _parts(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return slices.indices, slices.values


def _never(keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
    """How far sums would move their rows: of a branch that no policy takes."""
    del sums
    return tf.fill(tf.shape(keys), np.float32(np.inf))
