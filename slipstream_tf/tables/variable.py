"""The variable store, which watches dense variables as tables.

A table is a `tf.Variable` or the weights of a Keras embedding layer, and a row's index is its key.
The model looks up rows and the user's optimizer updates them. The store counts accesses from the
gradients, and masks or defers some of these gradients.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._compat import tensorflow_variable
from slipstream_tf._utils.errors import invalid, require_integer, require_number
from slipstream_tf.config import Table
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables.base import table_contents
from slipstream_tf.tables.watching import KerasMovements, WatchedGradients, WatchingStore


class VariableStore(WatchingStore):
    """Watches variables of shape [rows, dim] for saturation.

    The store neither owns nor looks up rows. It has the methods of a store that the saturation
    engine reads (tables, size, gather, hot keys, decay), but no `lookup` and no `apply_gradients`.
    The model gathers rows itself, and `distributed.DistributedGradientTape` passes the gradients to
    `filter_gradient`.

    Deferred gradients are summed per row in buffers on the variable's device. They are applied
    together with the gradients of a later step. At the end of training call
    `distributed.flush_deferred` to apply the remaining sums. With Keras's `fit`, the callbacks
    `Slipstream.callback` and `keras.RanksCallback` do so.

    Deferring by movement needs the optimizer, because it computes how far a sum would move its row.
    See `use_optimizer`.

    In a dry run all keys are counted, whereas native tables extrapolate from one key in 16.

    Note: access counts are float32. They are exact up to 16,777,216 lookups of a key (after decay).

    Example:

    >>> layer = keras.layers.Embedding(1000, 16)
    >>> layer.build()
    >>> store = slip.tables.VariableStore({"items": layer.embeddings})

    Attributes:
        tables: One table per variable, in the given order.
        offered_rows: Maps a table to an int64 scalar variable: the number of gradient rows before
            masking, one per key and step.
        masked_rows: Maps a table to an int64 scalar variable: the number of masked gradient rows.
    """

    _movements = KerasMovements()

    def __init__(self, variables: Mapping[str, Any], optimizer: Any = None):
        """Starts with access counts of zero and no saturated keys.

        Args:
            variables: Maps table names to variables: a `tf.Variable`, or a Keras variable such as
                `layer.embeddings` of a built `keras.layers.Embedding`. float32 [rows, dim], at
                least one row.
            optimizer: The optimizer that updates the variables. Required for deferring by movement,
                see `use_optimizer`. Adagrad must be built before the first step;
                `DistributedOptimizer` builds it.

        Raises:
            ValueError: There is no variable, a variable occurs twice, or a variable has another
                type, dtype or shape.
        """
        if not variables:
            raise invalid("variables", variables, "VariableStore", "at least one variable")
        self._variables = {name: _checked(name, value) for name, value in variables.items()}
        self._given = dict(variables)
        self.optimizer = self._updater = optimizer
        self._is_traced_without = False
        self._table_of: dict[Any, str] = {}
        for name, variable in self._variables.items():
            other = self._table_of.setdefault(variable.ref(), name)
            if other != name:
                allowed = f"a variable that is not in another table. It is already table {other!r}"
                raise invalid("variables", variable.name, f"table {name!r}", allowed)
        self.tables = tuple(
            Table(name, dim=variable.shape[1]) for name, variable in self._variables.items()
        )
        self._counts: dict[str, tf.Variable] = {}
        self._watched: dict[str, WatchedGradients] = {}
        for name, variable in self._variables.items():
            rows, dim = variable.shape
            with tf.device(variable.device):
                self._counts[name] = tf.Variable(
                    tf.zeros([rows]), trainable=False, name=f"{name}_access_counts"
                )
            self._watched[name] = WatchedGradients(name, dim, variable.device)
        self.offered_rows = {name: w.offered_rows for name, w in self._watched.items()}
        self.masked_rows = {name: w.masked_rows for name, w in self._watched.items()}

    def table_of(self, variable: Any) -> str | None:
        """Returns the name of a variable's table, or None if unwatched.

        Args:
            variable: A `tf.Variable` or Keras variable. Other objects return None.
        """
        inner = tensorflow_variable(variable)
        return None if inner is None else self._table_of.get(inner.ref())

    def filter_gradient(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Counts accesses, then masks or defers gradients by the policy.

        Gradient rows are summed per key. Every index counts as one access, including duplicates and
        saturated keys.

        Args:
            table: Name of the table.
            gradients: Gradients of the table's variable, values float32 [n, dim], in the scale in
                which they will be applied. With multiple ranks, pass this rank's part of the
                average.

        Returns:
            The gradients to apply now, including deferred gradients that are due: slices with
                distinct ascending indices and the same `dense_shape`.

        Raises:
            ValueError: There is no such table, or the optimizer has no state yet.
            TypeError: The gradients are not sparse.
            tf.errors.InvalidArgumentError: An index is out of range (only on a CPU).
        """
        passed = super().filter_gradient(table, gradients)
        ones = tf.ones_like(gradients.indices, tf.float32)
        self._counts[table].scatter_add(tf.IndexedSlices(ones, gradients.indices))
        return passed

    def _movement(self, table: str, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        is_unknown = self._movements.unknown(self._updater) is not None
        self._is_traced_without |= is_unknown and not tf.executing_eagerly()
        return super()._movement(table, keys, sums)

    @property
    def learning_rate(self) -> Any:
        """The optimizer's learning rate, a scalar; None without an optimizer."""
        return getattr(self.optimizer, "learning_rate", None)

    def _known_rate(self) -> Any:
        rate = self.learning_rate
        # The `learning_rate` of a Keras 2 optimizer may be a schedule.
        return 0.0 if rate is None or callable(rate) else rate

    def use_optimizer(self, optimizer: Any) -> None:
        """Sets the optimizer of the variables; call before the first step.

        `distributed.DistributedOptimizer` calls it for its store.

        Args:
            optimizer: The optimizer. Movement is defined for SGD without momentum and Adagrad of
                Keras 3, wrapped or not, without gradient accumulation and without loss scaling.

        Raises:
            ValueError: Gradients are deferred by movement, but movement is not defined for the
                optimizer, or gradients are deferred and the optimizer accumulates gradients.
        """
        for table, watched in self._watched.items():
            self._require_movement(table, watched.policy, optimizer)
        self.optimizer = self._updater = optimizer

    def variable(self, table: str) -> Any:
        """Returns a table's variable as it was passed to the constructor."""
        return self._given[self._require(table)]

    def is_deferring(self, table: str) -> tf.Variable:
        """Returns a scalar bool variable: whether gradients may be, or were, deferred.

        It is also True in a dry run of deferring.
        """
        return self._watched[self._require(table)].is_active

    def flush_with_next_gradients(self) -> None:
        """Schedules all deferred gradients of all tables for the next step.

        The next call of `filter_gradient` for a table returns its sums. In a dry run the sums are
        dropped instead.
        """
        for watched in self._watched.values():
            watched.flush()

    def deferred_rows(self) -> dict[str, int]:
        """Returns each table's number of unapplied deferred gradients (eager only)."""
        return {name: watched.num_unapplied() for name, watched in self._watched.items()}

    def _require_movement(self, table: str, policy: UpdatePolicy, optimizer: Any) -> None:
        if policy.mode != "defer":
            return
        place, unknown = self._place_of(table), self._movements.unknown(optimizer)
        if self._is_traced_without and unknown is None:
            unknown = "an optimizer that the store received after a step had been traced"
        if policy.trigger == "movement" and unknown is not None:
            allowed = (
                f"Interval(...), or Movement with {self._movements.known}. Pass the optimizer to "
                "VariableStore(..., optimizer=...), or create the DistributedOptimizer with the "
                "store before the first step"
            )
            raise invalid("until", "Movement", f"{place} with {unknown}", allowed)
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if steps:
            place += " with deferred gradients"
            allowed = "None, because deferred gradients cannot be accumulated"
            raise invalid("gradient_accumulation_steps", steps, place, allowed)

    def set_saturated(self, table: str, keys: Any) -> None:
        """Replaces the saturated keys of a table, from the next step.

        Gradients of saturated keys are masked, unless the policy defers or is a dry run.

        Args:
            table: Name of the table.
            keys: int64 [n], each from 0 to the number of rows - 1.

        Raises:
            ValueError: There is no such table, or a key is out of range.
        """
        self._require(table)
        keys = np.asarray(keys)
        if keys.size == 0:
            keys = keys.astype(np.int64)
        if keys.ndim != 1 or keys.dtype.kind not in "iu":
            described = f"{keys.dtype} {list(keys.shape)}"
            raise invalid("keys", described, f"table {table!r}", "integers of shape [n]")
        self._require_in_range(table, keys)
        watched = self._watched[table]
        self.set_row_flags(table, keys, np.full(keys.size, SATURATED))
        if watched.policy.mode != "defer":
            watched.masked.assign(watched.saturated)

    def _require_in_range(self, table: str, keys: np.ndarray) -> None:
        outside = keys[(keys < 0) | (keys >= self.size(table))]
        if outside.size:
            allowed = f"an integer from 0 to {self.size(table) - 1}"
            raise invalid("keys", int(outside[0]), f"table {table!r}", allowed)

    def _variable(self, table: str) -> tf.Variable:
        return self._variables[table]

    def num_keys(self, table: str) -> int:
        return self.size(table)

    def size(self, table: str) -> int:
        self._require(table)
        return int(self._variables[table].shape[0])

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows without counting accesses.

        Args:
            table: Name of the table.
            keys: int64 [n].

        Returns:
            rows: float32 [n, dim]. A key out of range returns zeros.
            found: bool [n], whether each key is in range.
        """
        self._require(table)
        keys = tf.convert_to_tensor(keys, tf.int64)
        found = (keys >= 0) & (keys < self.size(table))
        rows = tf.gather(self._variables[table], tf.where(found, keys, 0))
        return tf.where(found[:, None], rows, 0.0), found

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        require_integer("k", k, 0, None, f"table {table!r}")
        # `top_k` orders equal counts by ascending index.
        top = tf.math.top_k(self._counts[self._require(table)], min(k, self.size(table)))
        counts = top.values.numpy()
        is_accessed = counts > 0.0
        return top.indices.numpy()[is_accessed].astype(np.int64), counts[is_accessed]

    def decay_counts(self, factor: float) -> None:
        require_number("factor", factor, 0.0, 1.0, "VariableStore.decay_counts")
        for counts in self._counts.values():
            counts.assign(counts * factor)

    def export_table(self, table: str, flush: bool = False) -> dict[str, np.ndarray]:
        """Returns a table's contents as arrays, without deferred gradients.

        Args:
            table: Name of the table.
            flush: Must be False, because deferred gradients can be applied only with a step. See
                `flush_with_next_gradients`.

        Returns:
            Arrays in the format of `NativeStore.export_table`, sorted by key. There are no slots,
            because the optimizer has them.

        Raises:
            ValueError: `flush` is True.
        """
        if flush:
            place = f"export_table of {self._place_of(table)}"
            allowed = "False. Call distributed.flush_deferred to apply deferred gradients"
            raise invalid("flush", True, place, allowed)
        rows = self._variables[self._require(table)].numpy()
        return table_contents(np.arange(len(rows)), rows, counts=self._counts[table].numpy())

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces rows and access counts.

        Rows of keys that are not in the contents keep their values and get a count of 0.

        Args:
            table: Name of the table.
            contents: Result of `export_table` of any store. Slots are ignored.

        Raises:
            ValueError: A key is out of range, a value is invalid, or the rows have another
                dimension. The table stays unchanged.
        """
        keys, rows = np.asarray(contents["keys"], np.int64), np.asarray(contents["rows"])
        values = self._variables[self._require(table)].numpy()
        self._require_in_range(table, keys)
        for name in ("rows", "counts"):
            column = np.asarray(contents[name], np.float32).reshape(keys.size, -1)
            is_bad = ~np.isfinite(column) | ((column < 0) if name == "counts" else False)
            if is_bad.any():
                index, value = int(np.argwhere(is_bad)[0][0]), float(column[is_bad][0])
                where = f"key {int(keys[index])} of table {table!r} at index {index}"
                allowed = "a finite number >= 0" if name == "counts" else "a finite number"
                raise invalid(name, value, where, allowed)
        if rows.shape != (keys.size, values.shape[1]):
            allowed = f"the shape {(keys.size, values.shape[1])}"
            raise invalid("rows", rows.shape, f"table {table!r}", allowed)
        values[keys] = rows
        counts = np.zeros(len(values), np.float32)
        counts[keys] = contents["counts"]
        self._variables[table].assign(values)
        self._counts[table].assign(counts)


def _checked(name: str, value: Any) -> tf.Variable:
    variable = tensorflow_variable(value)
    if variable is None:
        allowed = "a tf.Variable or a Keras variable, for example `layer.embeddings`"
        raise invalid("variables", type(value).__name__, f"table {name!r}", allowed)
    if variable.dtype != tf.float32 or variable.shape.rank != 2 or not variable.shape[0]:
        described = f"{variable.dtype.name} {variable.shape}"
        allowed = "a float32 matrix [rows, dim] with at least one row"
        raise invalid("variables", described, f"table {name!r}", allowed)
    return variable
