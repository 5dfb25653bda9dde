"""The SOK store: watches variables of NVIDIA's Sparse Operation Kit in a loop that exists already.

Lookups and optimizers stay the user's own. In: the keys of batches, and gradients on their way to
the optimizer. Out: access counts and hot rows for the saturation engine, and the gradients that are
to be applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.config import TableConfig
from slipstream_tf.errors import invalid, require_integer
from slipstream_tf.initializers import Zeros
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures, pack
from slipstream_tf.ops.mask import KeySet, mask_gradients
from slipstream_tf.ops.update_policy import SATURATED, WATCHED, UpdateCounts, UpdatePolicy
from slipstream_tf.optimizers import SGD
from slipstream_tf.stores.native import NativeStore
from slipstream_tf.stores.sok import SokTable, open_table, slots_of, wrap_optimizer


class SokStore:
    """Watches SOK's variables for saturation; it owns no rows and looks none up.

    For a training loop that exists already, three calls: `observe` the keys of a batch before (or
    after) its lookup, `withhold` gradients on their way to the optimizer, and `step` of the
    `Slipstream` that the store was given to:

        store = SokStore({"user": user_variable}, optimizer)
        slipstream = Slipstream(store, config, comm=comm)
        for keys, labels in data:
            with tf.GradientTape() as tape:
                rows = sok.all2all_dense_embedding(user_variable, keys)
                ...
            slipstream.observe({"user": keys})
            gradients = tape.gradient(loss, [user_variable])
            optimizer.apply_gradients(store.withhold(zip(gradients, [user_variable])))
            slipstream.step()

    A key belongs to the rank that SOK puts its row on; there, gradients come in summed over the
    ranks, and are masked. That saves the update, not what travelled before: `lookup_sparse` sends
    as much for any keys. Keys are counted on the rank that looked them up.

    An HKV table that is full evicts the rows that were written longest ago, and those of masked
    keys are not written: they are, with their slots (give `optimizer`), once a window. Those writes
    show in `sok.incremental_model_dump`. A row that was evicted all the same starts anew when it is
    read; SOK does not tell, and `gather` says of every key that it was found.

    Access counts are those of at most `counted_keys` keys of a table, of which the least accessed
    makes room for a new one.

    Attributes:
        tables: one per variable, in the order given.
        optimizer: as given.
    """

    def __init__(self, variables: Any, optimizer: Any = None, counted_keys: int = 1 << 20):
        """Starts with counts of zero and no saturated key.

        Args:
            variables: table name -> `sok.DynamicVariable` or `sok.Variable`; or one variable, whose
                name the table gets.
            optimizer: that updates them, as `wrap_optimizer` or `sok.OptimizerWrapper` made it:
                slots of masked keys are kept from eviction. None: slots are left alone.
            counted_keys: keys of a table whose accesses are counted; at least those of a batch.

        Raises:
            ImportError: SOK cannot be loaded here.
            ValueError: no variable, one of another kind or with settings that SOK would misread;
                or an optimizer that SOK cannot use.
        """
        require_integer("counted_keys", counted_keys, 1, None, "SokStore")
        if optimizer is not None:
            self._require_optimizer(optimizer)
        self.optimizer = optimizer
        self._tables = {name: open_table(name, v) for name, v in _named(variables).items()}
        self._table_of = {id(table.variable): table for table in self._tables.values()}
        self.tables = tuple(TableConfig(name, dim=t.dim) for name, t in self._tables.items())
        counters = [
            TableConfig(name, dim=1, capacity=counted_keys, eviction="lfu", initializer=Zeros())
            for name in self._tables
        ]
        self._counter = NativeStore(counters, SGD())
        self._policies = dict.fromkeys(self._tables, UpdatePolicy("mask"))
        self._marked = dict.fromkeys(self._tables, np.empty(0, np.int64))
        self._masked = {n: KeySet(t.variable.device) for n, t in self._tables.items()}
        # In shadow mode gradients are masked to count them, and nothing is done with the result.
        with tf.device("CPU:0"):
            self._is_shadow = {name: _flag() for name in self._tables}
            self._offered = {name: _row_count() for name in self._tables}
            self._masked_rows = {name: _row_count() for name in self._tables}

    def _require_optimizer(self, optimizer: Any) -> None:
        if wrap_optimizer(optimizer) is not optimizer:
            kind = type(optimizer).__name__
            allowed = f"stores.sok.wrap_optimizer({kind}(...)), which updates the variables, too"
            raise invalid("optimizer", kind, "SokStore", allowed)

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
        self._counter.lookup(packed, specs, training=True)

    def withhold(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Masks the gradients of watched variables; call it where they go to the optimizer.

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
        """Sums the rows of each key and leaves out those of saturated keys.

        Args:
            table: name of the table.
            gradients: of the table's variable, as SOK gave them: indices of this rank's own rows.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`; in shadow mode
            those that came in.

        Raises:
            ValueError: there is no such table.
            TypeError: these are no sparse gradients.
        """
        self._require(table)
        result = mask_gradients(gradients, self._masked[table])
        with tf.device("CPU:0"):
            self._offered[table].assign_add(result.offered)
            self._masked_rows[table].assign_add(result.masked)
        # A tensor's condition: the policy may change without retracing.
        indices, values = tf.cond(
            self._is_shadow[table],
            lambda: (gradients.indices, gradients.values),
            lambda: (result.slices.indices, result.slices.values),
        )
        return tf.IndexedSlices(values, indices, gradients.dense_shape)

    def mark_rows(self, table: str, keys: Any, marks: Any) -> None:
        """Replaces the saturated keys of a table by those marked so; see `TrackedStore.mark_rows`.

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
        self._apply_policy(table)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Says whether gradients of saturated keys are masked, from the next step on.

        Raises:
            ValueError: gradients are to be deferred, moments to decay, or ranks to be simulated:
                the optimizer is not the store's.
        """
        place = f"table {self._require(table).name!r} of a SokStore"
        if policy.mode == "defer":
            allowed = "'gradients' or 'inputs'; a layer with store='sok' defers, too"
            raise invalid("skip", "defer", place, allowed)
        if policy.decay_skipped:
            raise invalid("decay_skipped", True, place, "False: the optimizer is not the store's")
        if policy.ranks > 1:
            raise invalid("simulated_ranks", policy.ranks, place, "1")
        self._policies[table] = policy
        self._apply_policy(table)

    def _apply_policy(self, table: str) -> None:
        policy, found = self._policies[table], self._tables[table]
        nothing = np.empty(0, np.int64)
        masked = found.indices(self._marked[table]) if policy.mode == "mask" else nothing
        self._masked[table].assign(masked)
        self._is_shadow[table].assign(policy.is_shadow)

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
        return UpdateCounts(offered=offered, sent=offered - masked, masked=masked)

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
        self._counter.decay_counts(factor)

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
