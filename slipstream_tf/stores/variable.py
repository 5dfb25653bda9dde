"""The variable store: dense `tf.Variable`s, and weights of Keras embedding layers, as tables.

A row's index is its key. The model looks rows up by itself and an optimizer of the user's choice
updates them; the store counts accesses from the gradients, and masks or holds back some of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._compat import tensorflow_variable
from slipstream_tf.config import TableConfig
from slipstream_tf.errors import invalid, require_integer, require_number
from slipstream_tf.ops.mask import KeySet, mask_gradients
from slipstream_tf.ops.update_policy import SATURATED, WATCHED, UpdateCounts, UpdatePolicy
from slipstream_tf.stores.held_sums import HeldSums
from slipstream_tf.stores.movement import KNOWN, movement, unknown_optimizer


class VariableStore:
    """Watches variables of shape [rows, dim] for saturation; it owns no rows and looks none up.

    It has what the saturation engine reads of an `EmbeddingStore` (tables, size, gather, hot keys,
    decay), but neither `lookup` nor `apply_gradients`: the model gathers rows itself, and
    `distributed.DistributedGradientTape` hands the gradients to `mask_gradients` below.

    Gradients that are deferred are summed per row in buffers of the store, on the variable's
    device, and leave with the gradients of a later step. `distributed.flush_held` applies what is
    left at the end (in Keras's `fit`, `Slipstream.callback` and `keras.RanksCallback` do).
    Deferring by movement needs to know how far a sum would move its row, and so the optimizer: see
    `use_optimizer`. In shadow mode all keys are counted, not one in 16.

    Access counts are kept in float32: exact up to 16,777,216 lookups of a key (after decay).

    Attributes:
        tables: one per variable, in the order given.
        offered_rows: table -> int64 scalar variable: gradient rows, one per key and step, before
            masking.
        masked_rows: table -> int64 scalar variable: those of them that were left out.
    """

    tables: tuple[TableConfig, ...]
    offered_rows: Mapping[str, tf.Variable]
    masked_rows: Mapping[str, tf.Variable]

    def __init__(self, variables: Mapping[str, Any], optimizer: Any = None):
        """Starts with counts of zero and no saturated key.

        Args:
            variables: table name -> tf.Variable, or Keras variable such as `layer.embeddings` of a
                `keras.layers.Embedding` that has been built; float32 [rows, dim], at least one row.
            optimizer: that updates them, for deferring by movement; see `use_optimizer`. Adagrad
                must be built before the first step, as `DistributedOptimizer` does by itself.

        Raises:
            ValueError: no variable, one given twice, or one of another kind, dtype or shape.
        """
        if not variables:
            raise invalid("variables", variables, "VariableStore", "one variable or more")
        self._variables = {name: _checked(name, value) for name, value in variables.items()}
        self._given = dict(variables)
        self._optimizer = optimizer
        self._is_traced_without = False
        self._table_of: dict[Any, str] = {}
        for name, variable in self._variables.items():
            other = self._table_of.setdefault(variable.ref(), name)
            if other != name:
                allowed = f"a variable once; it is table {other!r} already"
                raise invalid("variables", variable.name, f"table {name!r}", allowed)
        self.tables = tuple(
            TableConfig(name, dim=variable.shape[1]) for name, variable in self._variables.items()
        )
        self._counts: dict[str, tf.Variable] = {}
        self._masked: dict[str, KeySet] = {}
        self._held: dict[str, HeldSums] = {}
        self._nothing: dict[str, KeySet] = {}
        self._is_shadow: dict[str, tf.Variable] = {}
        self._policies = dict.fromkeys(self._variables, UpdatePolicy("mask"))
        self._marked = dict.fromkeys(self._variables, np.empty(0, np.int64))
        for name, variable in self._variables.items():
            with tf.device(variable.device):
                self._counts[name] = tf.Variable(
                    tf.zeros([variable.shape[0]]), trainable=False, name=f"{name}_access_counts"
                )
            self._masked[name] = KeySet(variable.device)
            rows, dim = variable.shape
            self._held[name] = HeldSums(dim, variable.device, rows)
            self._nothing[name] = KeySet(variable.device)
            with tf.device("CPU:0"):
                self._is_shadow[name] = tf.Variable(False, trainable=False)
        with tf.device("CPU:0"):
            self.offered_rows = {name: _row_count(name, "offered") for name in self._variables}
            self.masked_rows = {name: _row_count(name, "masked") for name in self._variables}

    def table_of(self, variable: Any) -> str | None:
        """Returns the name of a variable's table, or None if the store does not watch it.

        Args:
            variable: tf.Variable or Keras variable; anything else is not watched.
        """
        inner = tensorflow_variable(variable)
        return None if inner is None else self._table_of.get(inner.ref())

    def mask_gradients(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Counts accesses, sums the rows of each key, and masks or holds back as the policy says.

        Every index counts as an access, duplicates each time, saturated or not.

        Args:
            table: name of the table.
            gradients: of the table's variable, values float32 [n, dim], as they will be applied:
                of several ranks, this rank's part of their average.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`: what is to be
            applied now, held sums that are due included.

        Raises:
            ValueError: there is no such table, or the optimizer has no state yet.
            TypeError: these are no sparse gradients.
            tf.errors.InvalidArgumentError: an index is out of range (on a CPU).
        """
        self._require(table)
        result = mask_gradients(gradients, self._masked[table])
        # A tensor's condition: the policy may change without retracing.
        kept = tf.cond(
            self._is_shadow[table],
            lambda: mask_gradients(gradients, self._nothing[table]).slices,
            lambda: result.slices,
        )
        ones = tf.ones_like(gradients.indices, tf.float32)
        self._counts[table].scatter_add(tf.IndexedSlices(ones, gradients.indices))
        with tf.device("CPU:0"):
            self.offered_rows[table].assign_add(result.offered)
            self.masked_rows[table].assign_add(result.masked)
        held = self._held[table]
        indices, values = tf.cond(
            held.is_active,
            lambda: _parts(held.take(kept, functools.partial(self._movement, table))),
            lambda: _parts(kept),
        )
        return tf.IndexedSlices(values, indices, gradients.dense_shape)

    def _movement(self, table: str, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        if unknown_optimizer(self._optimizer) is not None:
            # Of a branch that no policy takes; a graph keeps it.
            self._is_traced_without |= not tf.executing_eagerly()
            return tf.fill(tf.shape(keys), np.float32(np.inf))
        return movement(self._optimizer, self._variables[table], keys, sums)

    @property
    def optimizer(self) -> Any:
        """What updates the variables, or None if the store was not told."""
        return self._optimizer

    @property
    def learning_rate(self) -> Any:
        """The optimizer's, a scalar; None if the store does not know the optimizer."""
        return getattr(self._optimizer, "learning_rate", None)

    def use_optimizer(self, optimizer: Any) -> None:
        """Says which optimizer updates the variables; call it before the first step.

        `distributed.DistributedOptimizer` does so for its store.

        Args:
            optimizer: the movement under it is known if it is Keras 3's SGD without momentum or
                Adagrad, wrapped or not, without gradient accumulation and loss scaling.

        Raises:
            ValueError: gradients are deferred by movement, which is not known under it.
        """
        for table, policy in self._policies.items():
            self._require_optimizer(policy, optimizer, f"table {table!r} of a VariableStore")
        self._optimizer = optimizer

    def variable(self, table: str) -> Any:
        """Returns a table's variable as it was given."""
        return self._given[self._require(table)]

    def is_deferring(self, table: str) -> tf.Variable:
        """Returns a scalar bool variable: whether rows are, or were, held back (shadow or not)."""
        return self._held[self._require(table)].is_active

    def let_go(self) -> None:
        """Makes all held sums leave with the next step's gradients, whatever the policy says."""
        for held in self._held.values():
            held.let_go()

    def pending(self) -> dict[str, int]:
        """Returns, for each table, the held sums that are still to be applied (eager only)."""
        return {name: held.pending() if held.holds else 0 for name, held in self._held.items()}

    def mark_rows(self, table: str, keys: Any, marks: Any) -> None:
        """Replaces the saturated keys of a table by those marked so; see `TrackedStore.mark_rows`.

        Raises:
            ValueError: a mark is WATCHED: the store does not see updates, so that the drift metric
                "signal" needs another store.
        """
        marks = np.asarray(marks, np.uint8)
        if (marks & WATCHED).any():
            allowed = "another drift metric than 'signal', which needs the native store"
            raise invalid("marks", "WATCHED", f"table {table!r} of a VariableStore", allowed)
        self._marked[table] = np.asarray(keys, np.int64)[(marks & SATURATED) > 0]
        self._apply_policy(table)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Says whether gradients are masked or held back, from the next step on.

        Sums that were held under a policy of another kind leave with the next step.

        Args:
            table: name of the table.
            policy: the buffers that it needs are allocated here: `max_rows` sums at most, and
                never more than the table has rows.

        Raises:
            ValueError: gradients are to be deferred by movement, but how the optimizer moves rows
                is not known; moments are to decay, or ranks to be simulated: the optimizer is not
                the store's.
        """
        place = f"table {self._require(table)!r} of a VariableStore"
        self._require_optimizer(policy, self._optimizer, place)
        if policy.decay_skipped:
            raise invalid("decay_skipped", True, place, "False: the optimizer is not the store's")
        if policy.ranks > 1:
            raise invalid("simulated_ranks", policy.ranks, place, "1")
        self._policies[table] = policy
        self._apply_policy(table)

    def _require_optimizer(self, policy: UpdatePolicy, optimizer: Any, place: str) -> None:
        unknown = unknown_optimizer(optimizer)
        if self._is_traced_without and unknown is None:
            unknown = "an optimizer that the store was told of after a step had been traced"
        if policy.mode == "defer" and policy.trigger == "movement" and unknown is not None:
            allowed = (
                f"defer_trigger='interval'; or {KNOWN}, given as VariableStore(..., optimizer=...) "
                "or by making the DistributedOptimizer with the store first"
            )
            raise invalid("defer_trigger", "movement", f"{place} with {unknown}", allowed)
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if policy.mode == "defer" and steps:
            raise invalid("gradient_accumulation_steps", steps, f"{place} that defers", "None")

    def _apply_policy(self, table: str) -> None:
        policy, marked = self._policies[table], self._marked[table]
        self._is_shadow[table].assign(policy.is_shadow and policy.mode == "mask")
        self._masked[table].assign(marked if policy.mode == "mask" else np.empty(0, np.int64))
        self._held[table].configure(policy, marked)

    def travelled(self, table: str, keys: Any) -> np.ndarray:
        """Refuses: the store does not see updates.

        Raises:
            ValueError: always.
        """
        del keys
        place = f"table {self._require(table)!r} of a VariableStore"
        raise invalid("metric", "signal", place, "another drift metric, or the native store")

    def update_counts(self, table: str) -> UpdateCounts:
        """Returns what became, or in shadow mode would have become, of a table's gradient rows."""
        offered = int(self.offered_rows[self._require(table)])
        masked, held = int(self.masked_rows[table]), self._held[table]
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

    def set_saturated(self, table: str, keys: Any) -> None:
        """Replaces the saturated keys of a table; steps see them from the next one on.

        They are masked, unless the policy defers.

        Args:
            table: name of the table.
            keys: int64 [n], each from 0 to the number of rows - 1.

        Raises:
            ValueError: there is no such table, or a key is out of range.
        """
        self._require(table)
        rows = self.size(table)
        keys = np.asarray(keys)
        if keys.size == 0:
            keys = keys.astype(np.int64)
        if keys.ndim != 1 or keys.dtype.kind not in "iu":
            described = f"{keys.dtype} {list(keys.shape)}"
            raise invalid("keys", described, f"table {table!r}", "integers [n]")
        outside = keys[(keys < 0) | (keys >= rows)]
        if outside.size:
            raise invalid("keys", int(outside[0]), f"table {table!r}", f"0 to {rows - 1}")
        self._marked[table] = keys.astype(np.int64)
        self._apply_policy(table)
        if self._policies[table].mode != "defer":
            self._masked[table].assign(self._marked[table])

    def size(self, table: str) -> int:
        """Returns the number of rows of a table, all of which are keys."""
        self._require(table)
        return int(self._variables[table].shape[0])

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows without counting them.

        Args:
            table: name of the table.
            keys: int64 [n].

        Returns:
            rows float32 [n, dim] and found bool [n]; a key out of range gives a row of zeros.
        """
        self._require(table)
        keys = tf.convert_to_tensor(keys, tf.int64)
        found = (keys >= 0) & (keys < self.size(table))
        rows = tf.gather(self._variables[table], tf.where(found, keys, 0))
        return tf.where(found[:, None], rows, 0.0), found

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the at most k most accessed keys.

        Returns:
            keys int64 [m] and decayed counts float32 [m], by count descending, then key
            ascending; keys with a count of 0 are left out.
        """
        require_integer("k", k, 0, None, f"table {table!r}")
        # Of equal counts, top_k takes the lower index first.
        top = tf.math.top_k(self._counts[self._require(table)], min(k, self.size(table)))
        counts = top.values.numpy()
        is_accessed = counts > 0.0
        return top.indices.numpy()[is_accessed].astype(np.int64), counts[is_accessed]

    def decay_counts(self, factor: float) -> None:
        """Multiplies the access counts of all tables by `factor`, 0 to 1."""
        require_number("factor", factor, 0.0, 1.0, "VariableStore.decay_counts")
        for counts in self._counts.values():
            counts.assign(counts * factor)

    def export_table(self, table: str, flush: bool = False) -> dict[str, np.ndarray]:
        """Returns all of a table as arrays, sorted by key; what is held back is not in.

        Args:
            table: name of the table.
            flush: must be false: held sums leave with a step's gradients only (`let_go`).

        Returns:
            As `NativeStore.export_table`; there are no slots, which are the optimizer's.

        Raises:
            ValueError: `flush` is true.
        """
        if flush:
            place = f"export_table of table {self._require(table)!r} of a VariableStore"
            raise invalid("flush", True, place, "False; distributed.flush_held applies sums")
        rows = self._variables[self._require(table)].numpy()
        return {
            "keys": np.arange(len(rows)),
            "rows": rows,
            "slots": np.empty((len(rows), 0), np.float32),
            "counts": self._counts[table].numpy(),
            "last_used": np.empty(0, np.int64),
            "steps": np.zeros(2, np.int64),
        }

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces rows and access counts by what `export_table` of any store gave.

        Rows of keys that are not in the contents stay as they are, with a count of 0.

        Raises:
            ValueError: a key is out of range, or the rows have another dimension. Nothing is
                changed then.
        """
        keys, rows = np.asarray(contents["keys"], np.int64), np.asarray(contents["rows"])
        values = self._variables[self._require(table)].numpy()
        outside = keys[(keys < 0) | (keys >= len(values))]
        if outside.size:
            raise invalid("keys", int(outside[0]), f"table {table!r}", f"0 to {len(values) - 1}")
        for name in ("rows", "counts"):
            column = np.asarray(contents[name], np.float32).reshape(keys.size, -1)
            is_bad = ~np.isfinite(column) | ((column < 0) if name == "counts" else False)
            if is_bad.any():
                place, value = int(np.argwhere(is_bad)[0][0]), float(column[is_bad][0])
                where = f"key {int(keys[place])} of table {table!r}, at place {place}"
                raise invalid(name, value, where, "finite numbers; counts from 0")
        if rows.shape != (keys.size, values.shape[1]):
            raise invalid("rows", rows.shape, f"table {table!r}", f"{(keys.size, values.shape[1])}")
        values[keys] = rows
        counts = np.zeros(len(values), np.float32)
        counts[keys] = contents["counts"]
        self._variables[table].assign(values)
        self._counts[table].assign(counts)

    def export_pending(self, table: str) -> dict[str, np.ndarray]:
        """Returns the gradient sums that are held back; they stay. See `ops.pending`.

        The learning rate is the optimizer's, or 0 where the store does not know it. And
        "is_leaving", a bool: whether they all leave with the next step.
        """
        held, rate = self._held[self._require(table)], self.learning_rate
        # Of the optimizers of Keras 2 it may be a schedule.
        is_known = rate is not None and not callable(rate)
        keys, ages, sums = held.export()
        return {
            "keys": keys,
            "ages": ages,
            "ranks": np.zeros(keys.size, np.int32),
            "sums": sums,
            "learning_rate": np.float32(rate if is_known else 0.0),
            "is_leaving": np.bool_(held.is_leaving),
        }

    def let_go_of(self, table: str) -> None:
        """Makes all sums that a table holds leave with the next step, whatever the policy."""
        self._held[self._require(table)].let_go_of_all()

    def import_pending(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the gradient sums that are held back; those of one key are added up.

        Raises:
            RuntimeError: there are some, but the policy defers nothing.
        """
        held = self._held[self._require(table)]
        held.replace(contents["keys"], contents["ages"], contents["sums"])

    def _require(self, table: str) -> str:
        if table not in self._variables:
            names = ", ".join(map(repr, self._variables))
            raise invalid("table", table, "a store", f"one of {names}")
        return table


def _checked(name: str, value: Any) -> tf.Variable:
    variable = tensorflow_variable(value)
    if variable is None:
        allowed = "a tf.Variable, or a Keras variable such as `layer.embeddings`"
        raise invalid("variables", type(value).__name__, f"table {name!r}", allowed)
    if variable.dtype != tf.float32 or variable.shape.rank != 2 or not variable.shape[0]:
        described = f"{variable.dtype.name} {variable.shape}"
        raise invalid("variables", described, f"table {name!r}", "float32 [rows >= 1, dim >= 1]")
    return variable


def _parts(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return slices.indices, slices.values


def _row_count(table: str, kind: str) -> tf.Variable:
    return tf.Variable(0, trainable=False, dtype=tf.int64, name=f"{table}_{kind}_rows")
