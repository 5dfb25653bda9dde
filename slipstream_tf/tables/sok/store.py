"""The SOK store, which watches SOK variables of an existing training loop.

The loop keeps its lookups and its optimizer. It passes the keys of each batch and the gradients to
the store. The store counts accesses, finds hot keys for the saturation engine, and returns the
gradients to apply.
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

# Minimum size of the buffer for deferred sums. It grows with the table.
_FEWEST_SUMS = 1 << 16


class UnchangedKeys:
    """Keys without updates, each with the time of its last possible update."""

    def __init__(self) -> None:
        """Starts without keys."""
        self._keys = np.empty(0, np.int64)
        self._since = np.empty(0)

    def replace(self, keys: np.ndarray, now: float) -> None:
        """Replaces the keys; keys that were included before keep their time.

        Args:
            keys: int64 [n], distinct keys that are not updated from now on.
            now: Present time, in seconds.
        """
        since = np.full(keys.size, now)
        _, here, before = np.intersect1d(keys, self._keys, return_indices=True)
        since[here] = self._since[before]
        self._keys, self._since = keys, since

    def forget(self) -> None:
        """Forgets all keys.

        Call it before an update that may change any row.
        """
        self._keys, self._since = np.empty(0, np.int64), np.empty(0)

    def since(self, time: float) -> np.ndarray:
        """Returns the keys without an update after `time`, int64 [n]."""
        return self._keys[self._since <= time]


class SokStore(SpreadStore, WatchingStore):
    """Watches SOK variables for saturation.

    The store neither owns nor looks up rows. An existing training loop needs three calls: `observe`
    with the keys of a batch before or after its lookup, `filter_gradients` with the gradients
    before they reach the optimizer, and `step` of the `Slipstream` that uses the store.

    Example:

    >>> store = SokStore({"user": variable}, optimizer)  # doctest: +SKIP
    >>> slipstream = slip.Slipstream(store, slip.MaskGradients())  # doctest: +SKIP
    >>> def train_step(keys, labels):
    ...     with tf.GradientTape() as tape:
    ...         rows = sok.all2all_dense_embedding(variable, keys)
    ...         loss = loss_of(rows, labels)
    ...     slipstream.observe({"user": keys})
    ...     gradients = tape.gradient(loss, [variable])
    ...     optimizer.apply_gradients(store.filter_gradients(zip(gradients, [variable])))
    ...     slipstream.step()

    Each key is owned by the rank on which SOK stores its row. The owner receives the gradients
    summed over the ranks, and masks or defers them. Therefore masking saves the update, but not the
    lookup and not the preceding exchange. Lookups may use `sok.all2all_dense_embedding` or
    `sok.lookup_sparse`. Accesses are counted on the rank that looks up the key.

    Deferring by interval works with every optimizer. Deferring by movement requires `optimizer`,
    one of `SokMovements.known`. Its slot variables are then created together with the store, and
    the slots of a key with its first gradient. Call `flush` at the end of training to apply the
    remaining sums.

    A full HierarchicalKV (HKV) table, `var_type="hybrid"`, evicts the rows with the oldest write.
    Rows of masked keys are not updated, so the store rewrites them, and their slots if `optimizer`
    is given, unchanged once per window. `sok.incremental_model_dump` reports these writes as
    changes. `sok_files.written_since` excludes most of these rows.

    Note: a row that SOK evicted is recreated with its initial values when it is read. SOK does not
    report this, so `gather` reports every key as found.

    Messages that the loop sends through SOK are not included in the communicator's traffic.

    By default, access counts are in host memory, for at most `counted_keys` keys per table; the
    least accessed key is evicted for a new key. With `counts_on_device` they are estimates,
    computed on the table's device, see `ops.hot_keys.HotKeySketch`.

    Attributes:
        tables: One table per variable, in the given order.
        optimizer: The optimizer as passed to the constructor.
        comm: The communicator as passed to the constructor.
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
        """Starts with access counts of zero and no saturated keys.

        Args:
            variables: Maps table names to `sok.DynamicVariable`s or `sok.Variable`s. A single
                variable is accepted too; its name becomes the table's name.
            optimizer: The optimizer of the variables, created by `wrap_optimizer` or
                `sok.OptimizerWrapper`. Protects slots of masked keys from eviction and is required
                for deferring by movement. None means that the store does not access slots.
            comm: Communicator of the ranks over which SOK shards its rows, from
                `distributed.init()`. None means a single process.
            counted_keys: Maximum number of counted keys per table. Must be at least the number of
                keys in a batch.
            counts_on_device: Whether to estimate access counts on the table's device. Takes 96
                bytes for each of `counted_keys`, rounded up to a power of two.

        Raises:
            ImportError: SOK cannot be loaded.
            ValueError: There is no variable, a variable has another type or settings that SOK would
                misread, SOK does not support the optimizer, or `comm` has another number of ranks
                than SOK.
        """
        require_integer("counted_keys", counted_keys, 1, None, "SokStore")
        if optimizer is not None and wrap_optimizer(optimizer) is not optimizer:
            kind = type(optimizer).__name__
            allowed = (
                "an optimizer that can update SOK's variables. Pass "
                f"tables.sok.wrap_optimizer({kind}(...))"
            )
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
        """Counts the accesses of a batch, including repeated keys.

        Args:
            table: Name of the table.
            keys: int64 or int32, a tensor of any shape or a RaggedTensor. -1 is padding.
        """
        name = self._require(table)
        specs = [FeatureSpec(name, name)]
        self.count_accesses(pack({name: tf.reshape(flat_values(keys), [-1])}, specs))

    def count_accesses(self, packed: PackedFeatures) -> None:
        """Counts the accesses of all features of a batch.

        `Slipstream.observe` calls it.

        Args:
            packed: The keys, from `features.pack`.
        """
        self._counter.count(packed)

    @tf.autograph.experimental.do_not_convert
    def filter_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Masks or defers gradients of watched variables; call before the optimizer.

        Args:
            grads_and_vars: Pairs of gradient and variable. Pairs of other variables, and pairs with
                gradient None, are returned unchanged.

        Returns:
            The pairs in the given order.
        """
        return [
            (gradient, variable)
            if gradient is None or id(variable) not in self._table_of
            else (self.filter_gradient(self._table_of[id(variable)], gradient), variable)
            for gradient, variable in grads_and_vars
        ]

    def filter_gradient(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums gradients per key, then masks or defers them by the policy.

        Args:
            table: Name of the table.
            gradients: Gradients of the table's variable, as returned by SOK. Indices refer to rows
                of this rank.

        Returns:
            The gradients to apply now, including deferred gradients that are due: slices with
                distinct ascending indices and the same `dense_shape`.

        Raises:
            ValueError: There is no such table.
            TypeError: The gradients are not sparse.
        """
        # In a graph, tensors received from other ranks have no static shape.
        shaped = tf.IndexedSlices(
            tf.ensure_shape(gradients.values, [None, self._table(table).dim]),
            tf.ensure_shape(gradients.indices, [None]),
            gradients.dense_shape,
        )
        return super().filter_gradient(table, shaped)

    def _movement(self, table: str, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        if not self._table(table).is_dynamic:
            # No policy takes this branch.
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
        """Replaces a table's saturated keys; see `TrackedStore.set_row_flags`.

        Rewrites the rows of keys that were or are saturated, so that HKV does not evict them.
        """
        found, watched = self._table(table), self._watched[self._require(table)]
        before = watched.saturated
        super().set_row_flags(table, keys, flags)
        # Include the keys of the ended window: they are no longer masked, but could be evicted
        # before their next update.
        touched = np.union1d(before, watched.saturated)
        found.touch(touched, slots_of(self._updater, found.variable).values())
        # If sums were deferred under an earlier policy, the next step still updates rows.
        if watched.masks and not watched.buffer.state().num_deferred:
            self._unchanged[table].replace(np.unique(watched.saturated), time.time())
        else:
            self._unchanged[table].forget()

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
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
                f"{self._movements.known}. The current store has {unknown}"
            )
        elif not self._table(table).is_dynamic:
            allowed = "Interval(...), because Movement is supported for a sok.DynamicVariable only"
        if allowed:
            raise invalid("until", "Movement", self._place_of(table), allowed)

    def _max_deferred(self, table: str) -> int:
        found = self._table(table)
        # Bounded by the table's size, because a buffer for the full budget would be allocated at
        # once.
        return max(2 * found.size(), _FEWEST_SUMS) if found.is_dynamic else found.size()

    def unchanged_since(self, table: str, moment: float) -> np.ndarray:
        """Returns this rank's keys, int64 [n], masked continuously since a time.

        Their rows were rewritten once per window, but unchanged.

        Args:
            table: Name of the table.
            moment: Unix time, in seconds.
        """
        return self._unchanged[self._require(table)].since(moment)

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys that this rank's batches access most.

        See `TrackedStore.hot_keys`.
        """
        return self._counter.hot_keys(self._require(table), k)

    def decay_counts(self, factor: float) -> None:
        self._counter.decay_counts(factor)

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        return self._counter.export_accesses(self._require(table))

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces the access counts; estimated counts are reset instead."""
        self._counter.import_accesses(self._require(table), accesses)

    def flush(self, optimizer: Any = None) -> None:
        """Applies all deferred gradients as one more optimizer update.

        Not a collective.

        Args:
            optimizer: The optimizer of the variables. Defaults to the store's optimizer.

        Raises:
            ValueError: There is no optimizer.
        """
        optimizer = optimizer or self.optimizer
        if optimizer is None:
            allowed = "the optimizer of the training loop. Pass it to flush or to SokStore"
            raise invalid("optimizer", None, "SokStore.flush", allowed)
        pairs = []
        for name, found in self._opened.items():
            self._watched[name].flush()
            empty, shape = tf.zeros([0, found.dim]), tf.constant([0, found.dim])
            nothing = tf.IndexedSlices(empty, tf.zeros([0], tf.int64), shape)
            pairs.append((self.filter_gradient(name, nothing), found.variable))
        optimizer.apply_gradients(pairs)

    def slot_layout(self, table: str) -> SlotLayout:
        return self._rule.layout(self._table(table))

    def export_table(self, table: str, flush: bool = False) -> dict[str, np.ndarray]:
        """Returns this rank's rows, and the slots of dynamic variables.

        Args:
            table: Name of the table.
            flush: Must be False. Call the store's `flush` to apply deferred gradients.

        Returns:
            The arrays of `ops.table.export_table`, with access counts of 0 (see `export_accesses`),
            and "powers", float32, the powers for Adam's bias correction.

        Raises:
            ValueError: `flush` is True.
        """
        found = self._table(table)
        if flush:
            place = f"export_table of {self._place_of(table)}"
            allowed = "False. Call SokStore.flush to apply deferred gradients"
            raise invalid("flush", True, place, allowed)
        steps, powers = self._rule.export()
        contents = table_contents(**self._rule.export_rows(found), steps=steps)
        return {**contents, "powers": powers}

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces this rank's rows and slots by contents of any store.

        SOK cannot remove keys. Keys of a dynamic variable that are not in the contents are reset if
        the variable's initializer is a number, and stay unchanged otherwise. Keys of a
        `sok.Variable` stay unchanged.

        Args:
            table: Name of the table.
            contents: Result of `export_table`. Keys of other ranks are ignored.

        Raises:
            ValueError: An array has another shape, or SOK reserves one of the keys. The table stays
                unchanged.
            RuntimeError: The table is too small, and SOK evicted rows of the contents.
        """
        found = self._table(table)
        self._rule.replace_rows(found, self._rule.own_part(found, contents))
        self._rule.replace(contents)


def _named(variables: Any) -> dict[str, Any]:
    if not isinstance(variables, Mapping):
        name = getattr(variables, "name", None)
        if not isinstance(name, str):
            kind = type(variables).__name__
            allowed = (
                "a sok.DynamicVariable, a sok.Variable, or a dictionary from table names to these"
            )
            raise invalid("variables", kind, "SokStore", allowed)
        return {name.split(":")[0]: variables}
    if not variables:
        raise invalid("variables", variables, "SokStore", "at least one variable")
    return dict(variables)
