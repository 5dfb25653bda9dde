"""The SOK store: watches variables of NVIDIA's Sparse Operation Kit in a loop that exists already.

Lookups and optimizers stay the user's own. In: the keys of batches, and gradients on their way to
the optimizer. Out: access counts and hot rows for the saturation engine, and the gradients that are
to be applied.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.config import Table
from slipstream_tf.errors import invalid, require_integer
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.stores.access_counts import AccessCounts, EstimatedCounts, ExactCounts
from slipstream_tf.stores.base import SlotLayout, table_contents
from slipstream_tf.stores.replicas import ReadOnlyRows, most_accessed
from slipstream_tf.stores.sok.library import wrap_optimizer
from slipstream_tf.stores.sok.optimizers import SokRule, export_rows, own_part, replace_rows
from slipstream_tf.stores.sok.table import SokTable, open_table
from slipstream_tf.stores.sok.watched import WatchedTables


class SokStore(WatchedTables):
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
    ranks, and are masked or deferred. That saves the update, not what was sent before:
    `lookup_sparse` sends as much for any keys. Keys are counted on the rank that looked them up.

    `lookup`, in place of `sok.all2all_dense_embedding`, saves the exchange, too: while gradients of
    saturated keys are masked, every rank reads the most accessed of those keys' rows from copies of
    its own, which are made anew at each window's end.

    Gradients are deferred by interval under any optimizer; by movement where `optimizer` is given
    and is one of `SokMovements.known`: its slots then are made with the store, and those of a key
    when its first gradient comes. `flush` applies what is deferred at the end.

    An HKV table that is full evicts the rows that were written longest ago, and those of masked
    keys are not written: they are, with their slots (give `optimizer`), once a window. Those writes
    show in `sok.incremental_model_dump`; `sok_files.written_since` knows most of them. A row that
    was evicted all the same starts anew when it is read; SOK does not tell, and `gather` says of
    every key that it was found.

    What `lookup` has SOK send is in the communicator's traffic; what the loop itself sends through
    `sok` is not.

    Access counts are exact, in host memory, and those of at most `counted_keys` keys of a table,
    of which the least accessed is evicted for a new one. With `counts_on_device` they are estimates
    of all keys, made on the table's device; see `ops.hot_keys.HotKeySketch`.

    Attributes:
        tables: one per variable, in the order given.
        optimizer: as given.
        comm: as given.
    """

    has_read_only_replicas = True

    def __init__(
        self,
        variables: Any,
        optimizer: Any = None,
        comm: Any = None,
        counted_keys: int = 1 << 20,
        replica_bytes: int = 128 << 20,
        counts_on_device: bool = False,
    ):
        """Starts with counts of zero and no saturated key.

        Args:
            variables: table name -> `sok.DynamicVariable` or `sok.Variable`; or one variable, whose
                name the table gets.
            optimizer: that updates them, as `wrap_optimizer` or `sok.OptimizerWrapper` made it:
                slots of masked keys are not evicted, and gradients may be deferred by movement.
                None: slots are left alone.
            comm: the ranks that SOK spreads its rows over, from `distributed.init()`; None: this
                process alone.
            counted_keys: keys of a table whose accesses are counted; at least those of a batch.
            replica_bytes: of a table's rows that `lookup` reads from copies.
            counts_on_device: whether accesses are estimated where the table is, in 96 bytes for
                each of `counted_keys` (rounded up to a power of two).

        Raises:
            ImportError: SOK cannot be loaded here.
            ValueError: no variable, one of another kind or with settings that SOK would misread;
                an optimizer that SOK cannot use; or other ranks than SOK's.
        """
        require_integer("counted_keys", counted_keys, 1, None, "SokStore")
        if optimizer is not None and wrap_optimizer(optimizer) is not optimizer:
            kind = type(optimizer).__name__
            allowed = f"stores.sok.wrap_optimizer({kind}(...)), which updates the variables, too"
            raise invalid("optimizer", kind, "SokStore", allowed)
        self.optimizer, self.comm = optimizer, comm
        self._opened = {name: open_table(name, v) for name, v in _named(variables).items()}
        self._require_ranks(max(table.ranks for table in self._opened.values()))
        require_integer("replica_bytes", replica_bytes, 0, None, "SokStore")
        self._replica_bytes = replica_bytes
        self.tables = tuple(Table(name, dim=t.dim) for name, t in self._opened.items())
        counter: AccessCounts
        if counts_on_device:
            devices = {name: table.variable.device for name, table in self._opened.items()}
            counter = EstimatedCounts(devices, counted_keys)
        else:
            counter = ExactCounts(self._opened, counted_keys)
        self._watch(optimizer, counter)
        self._rule = SokRule(optimizer)
        self._read_only = {
            name: ReadOnlyRows(table.dim, table.variable.device)
            for name, table in self._opened.items()
        }
        # Tables that `lookup` reads: replicas are made of no others.
        self._looked_up: set[str] = set()

    @property
    def opened(self) -> tuple[SokTable, ...]:
        """The watched variables, in the order of `tables`."""
        return tuple(self._opened.values())

    def observe(self, table: str, keys: Any) -> None:
        """Counts the accesses of a batch; every occurrence of a key counts.

        Args:
            table: name of the table.
            keys: int64 (or int32), a tensor of any shape or a RaggedTensor; -1 is padding.
        """
        name = self._require(table)
        if isinstance(keys, tf.RaggedTensor):
            keys = keys.flat_values
        elif isinstance(keys, tf.SparseTensor):
            keys = keys.values
        specs = [FeatureSpec(name, name)]
        self.count_accesses(pack({name: tf.reshape(keys, [-1])}, specs), specs)

    def lookup(self, table: str, keys: tf.Tensor) -> tf.Tensor:
        """Looks up rows through SOK, but for those that this rank has a copy of; a collective.

        Args:
            table: name of the table.
            keys: int64 [n].

        Returns:
            float32 [n, dim], as `sok.all2all_dense_embedding` gives them. No gradient flows to
            copies.
        """
        found = self._table(table)
        self._looked_up.add(table)
        return self._read_only[table].look_up(keys, lambda k: self._lookup(found, k))

    def set_read_only(self, hot: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Gives every rank copies of rows that `lookup` reads until `set_row_flags`; a collective.

        Rows are copied while their gradients are masked, and where `lookup` is used.

        Args:
            hot: table -> keys int64 [n] and access counts float32 [n] over all ranks, by count
                descending; tables not named freeze nothing.
        """
        if self._ranks == 1:
            return
        for name, found in self._opened.items():
            if name in hot and name in self._looked_up and self._watched[name].masks:
                most = self._replica_bytes // (4 * found.dim)
                keys = most_accessed(hot, name, most, self.least_accesses)
                everyones, rows = self._everyones(found, keys)
                self._read_only[name].assign(everyones.numpy(), rows.numpy())

    def read_only_keys(self, table: str) -> int:
        """Returns how many keys of a table have copies in this window."""
        return self._read_only[self._require(table)].size

    def flush(self, optimizer: Any = None) -> None:
        """Applies all deferred gradients, as one more update of the optimizer; no collective.

        Args:
            optimizer: that updates the variables; None: the store's.

        Raises:
            ValueError: there is none.
        """
        optimizer = optimizer or self.optimizer
        if optimizer is None:
            raise invalid("optimizer", None, "SokStore.flush", "the one of the training loop")
        self._flush_by(optimizer)

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """See `WatchedTables.set_row_flags`; none of the table's replicas is read-only then."""
        super().set_row_flags(table, keys, flags)
        nothing = np.empty((0, self._table(table).dim), np.float32)
        self._read_only[table].assign(np.empty(0, np.int64), nothing)

    def slot_layout(self, table: str) -> SlotLayout:
        """Returns whose slots the rows of a table have, and how they start."""
        return self._rule.layout(self._table(table))

    def export_table(self, table: str, flush: bool = False) -> dict[str, np.ndarray]:
        """Returns this rank's rows, with the optimizer's slots of dynamic variables.

        Args:
            table: name of the table.
            flush: must be false: deferred gradients are not in; `flush` of the store applies them.

        Returns:
            The arrays of `ops.table.export_table`, with counts of 0 (`export_accesses` has them);
            and "powers", float32, what Adam's bias correction goes by.

        Raises:
            ValueError: `flush` is true.
        """
        found = self._table(table)
        if flush:
            place = f"export_table of {self._place_of(table)}"
            raise invalid("flush", True, place, "False; SokStore.flush applies sums")
        steps, powers = self._rule.export()
        contents = table_contents(**export_rows(found, self._rule), steps=steps)
        return {**contents, "powers": powers}

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
        found = self._table(table)
        replace_rows(found, self._rule, own_part(found, self._rule, contents))
        self._rule.replace(contents)


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
