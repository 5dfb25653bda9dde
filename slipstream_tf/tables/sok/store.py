"""The SOK store: watches variables of NVIDIA's Sparse Operation Kit in a loop that exists already.

Lookups and optimizers stay the user's own. In: the keys of batches, and gradients on their way to
the optimizer. Out: access counts and hot rows for the saturation engine, and the gradients that are
to be applied.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.config import Table
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures, flat_values, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables.base import SlotLayout, table_contents
from slipstream_tf.tables.replicas import AccessCounts, EstimatedCounts, ExactCounts
from slipstream_tf.tables.sok.optimizers import SokMovements, SokRule
from slipstream_tf.tables.sok.table import (
    SokTable,
    SpreadStore,
    open_table,
    slots_of,
    wrap_optimizer,
)
from slipstream_tf.tables.watching import WatchedGradients, WatchingStore

# Sums that there is room for at first, in a table of few rows; more as it grows.
_FEWEST_SUMS = 1 << 16


class UnchangedKeys:
    """Keys that nothing updates, each with the time from which on."""

    def __init__(self) -> None:
        """Has no key."""
        self._keys = np.empty(0, np.int64)
        self._since = np.empty(0)

    def replace(self, keys: np.ndarray, now: float) -> None:
        """Says which keys nothing updates from now on; those that were among them keep their time.

        Args:
            keys: int64 [n], each once.
            now: seconds.
        """
        since = np.full(keys.size, now)
        _, here, before = np.intersect1d(keys, self._keys, return_indices=True)
        since[here] = self._since[before]
        self._keys, self._since = keys, since

    def forget(self) -> None:
        """Drops all keys: they may be updated."""
        self._keys, self._since = np.empty(0, np.int64), np.empty(0)

    def since(self, time: float) -> np.ndarray:
        """Returns int64 [n], the keys that nothing has updated after a time, in seconds."""
        return self._keys[self._since <= time]


class SokStore(SpreadStore, WatchingStore):
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
    ranks, and are masked or deferred. That saves the update, not the lookup or the exchange before
    it. Lookups may be `sok.all2all_dense_embedding` or `sok.lookup_sparse`. Keys are counted on the
    rank that looked them up.

    Gradients are deferred by interval under any optimizer; by movement where `optimizer` is given
    and is one of `SokMovements.known`: its slots then are made with the store, and those of a key
    when its first gradient comes. `flush` applies what is deferred at the end.

    An HKV table that is full evicts the rows that were written longest ago, and those of masked
    keys are not written: they are, with their slots (give `optimizer`), once a window. Those writes
    show in `sok.incremental_model_dump`; `sok_files.written_since` knows most of them. A row that
    was evicted all the same starts anew when it is read; SOK does not tell, and `gather` says of
    every key that it was found.

    What the loop sends through `sok` is not in the communicator's traffic.

    Access counts are exact, in host memory, and those of at most `counted_keys` keys of a table,
    of which the least accessed is evicted for a new one. With `counts_on_device` they are estimates
    of all keys, made on the table's device; see `ops.hot_keys.HotKeySketch`.

    Attributes:
        tables: one per variable, in the order given.
        optimizer: as given.
        comm: as given.
    """

    defers_at_owners = True
    _movements = SokMovements()

    def __init__(
        self,
        variables: Any,
        optimizer: Any = None,
        comm: Any = None,
        counted_keys: int = 1 << 20,
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
            allowed = f"tables.sok.wrap_optimizer({kind}(...)), which updates the variables, too"
            raise invalid("optimizer", kind, "SokStore", allowed)
        self.optimizer, self.comm = optimizer, comm
        self._opened = {name: open_table(name, v) for name, v in _named(variables).items()}
        self._require_ranks(max(table.ranks for table in self._opened.values()))
        self.tables = tuple(Table(name, dim=t.dim) for name, t in self._opened.items())
        self._counter: AccessCounts
        if counts_on_device:
            devices = {name: table.variable.device for name, table in self._opened.items()}
            self._counter = EstimatedCounts(devices, counted_keys)
        else:
            self._counter = ExactCounts(self._opened, counted_keys)
        self._updater, self._rule = optimizer, SokRule(optimizer)
        self._table_of = {id(table.variable): name for name, table in self._opened.items()}
        self._unchanged = {name: UnchangedKeys() for name in self._opened}
        self._watched = {
            name: WatchedGradients(name, table.dim, table.variable.device)
            for name, table in self._opened.items()
        }
        if self._movements.unknown(optimizer) is None:
            dynamic = [t.variable for t in self._opened.values() if t.is_dynamic]
            self._movements.prepare(optimizer, dynamic)

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
        specs = [FeatureSpec(name, name)]
        self.count_accesses(pack({name: tf.reshape(flat_values(keys), [-1])}, specs))

    def count_accesses(self, packed: PackedFeatures) -> None:
        """Counts the accesses of a batch of several features; `Slipstream.observe` does so.

        Args:
            packed: the keys, from `features.pack`.
        """
        self._counter.count(packed)

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
        pairs = []
        for name, found in self._opened.items():
            self._watched[name].flush()
            empty, shape = tf.zeros([0, found.dim]), tf.constant([0, found.dim])
            nothing = tf.IndexedSlices(empty, tf.zeros([0], tf.int64), shape)
            pairs.append((self.mask_gradients(name, nothing), found.variable))
        optimizer.apply_gradients(pairs)

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
        contents = table_contents(**self._rule.export_rows(found), steps=steps)
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
        self._rule.replace_rows(found, self._rule.own_part(found, contents))
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
