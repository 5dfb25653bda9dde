"""The variable store: dense `tf.Variable`s, and weights of Keras embedding layers, as tables.

A row's index is its key. The model looks rows up by itself and an optimizer of the user's choice
updates them; the store counts accesses from the gradients, and masks or defers some of them.
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
    """Watches variables of shape [rows, dim] for saturation; it owns no rows and looks none up.

    It has what the saturation engine reads of an `EmbeddingStore` (tables, size, gather, hot keys,
    decay), but neither `lookup` nor `apply_gradients`: the model gathers rows itself, and
    `distributed.DistributedGradientTape` hands the gradients to `mask_gradients` below.

    Gradients that are deferred are summed per row in buffers of the store, on the variable's
    device, and leave with the gradients of a later step. `distributed.flush_deferred` applies what
    is left at the end (in Keras's `fit`, `Slipstream.callback` and `keras.RanksCallback` do).
    Deferring by movement needs to know how far a sum would move its row, and so the optimizer: see
    `use_optimizer`. In shadow mode all keys are counted, not one in 16.

    Access counts are kept in float32: exact up to 16,777,216 lookups of a key (after decay).

    Attributes:
        tables: one per variable, in the order given.
        offered_rows: table -> int64 scalar variable: gradient rows, one per key and step, before
            masking.
        masked_rows: table -> int64 scalar variable: those of them that were left out.
    """

    _movements = KerasMovements()

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
        self.optimizer = self._updater = optimizer
        self._is_traced_without = False
        self._table_of: dict[Any, str] = {}
        for name, variable in self._variables.items():
            other = self._table_of.setdefault(variable.ref(), name)
            if other != name:
                allowed = f"a variable once; it is table {other!r} already"
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
        """Returns the name of a variable's table, or None if the store does not watch it.

        Args:
            variable: tf.Variable or Keras variable; anything else is not watched.
        """
        inner = tensorflow_variable(variable)
        return None if inner is None else self._table_of.get(inner.ref())

    def mask_gradients(self, table: str, gradients: tf.IndexedSlices) -> tf.IndexedSlices:
        """Counts accesses, sums the rows of each key, and masks or defers as the policy says.

        Every index counts as an access, duplicates each time, saturated or not.

        Args:
            table: name of the table.
            gradients: of the table's variable, values float32 [n, dim], as they will be applied:
                of several ranks, this rank's part of their average.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`: what is to be
            applied now, deferred gradients that are due included.

        Raises:
            ValueError: there is no such table, or the optimizer has no state yet.
            TypeError: these are no sparse gradients.
            tf.errors.InvalidArgumentError: an index is out of range (on a CPU).
        """
        passed = super().mask_gradients(table, gradients)
        ones = tf.ones_like(gradients.indices, tf.float32)
        self._counts[table].scatter_add(tf.IndexedSlices(ones, gradients.indices))
        return passed

    def _movement(self, table: str, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        is_unknown = self._movements.unknown(self._updater) is not None
        self._is_traced_without |= is_unknown and not tf.executing_eagerly()
        return super()._movement(table, keys, sums)

    @property
    def learning_rate(self) -> Any:
        """The optimizer's, a scalar; None if the store does not know the optimizer."""
        return getattr(self.optimizer, "learning_rate", None)

    def _known_rate(self) -> Any:
        rate = self.learning_rate
        # Of the optimizers of Keras 2 it may be a schedule.
        return 0.0 if rate is None or callable(rate) else rate

    def use_optimizer(self, optimizer: Any) -> None:
        """Says which optimizer updates the variables; call it before the first step.

        `distributed.DistributedOptimizer` does so for its store.

        Args:
            optimizer: the movement under it is known if it is Keras 3's SGD without momentum or
                Adagrad, wrapped or not, without gradient accumulation and loss scaling.

        Raises:
            ValueError: gradients are deferred by movement, which is not known under it.
        """
        for table, watched in self._watched.items():
            self._require_movement(table, watched.policy, optimizer)
        self.optimizer = self._updater = optimizer

    def variable(self, table: str) -> Any:
        """Returns a table's variable as it was given."""
        return self._given[self._require(table)]

    def is_deferring(self, table: str) -> tf.Variable:
        """Returns a scalar bool variable: whether rows are, or were, deferred (dry run or not)."""
        return self._watched[self._require(table)].is_active

    def flush_with_next_gradients(self) -> None:
        """Makes all deferred gradients leave with those of the next step, whatever the policy."""
        for watched in self._watched.values():
            watched.flush()

    def deferred_rows(self) -> dict[str, int]:
        """Returns, for each table, the deferred gradients still to be applied (eager only)."""
        return {name: watched.num_unapplied() for name, watched in self._watched.items()}

    def _require_movement(self, table: str, policy: UpdatePolicy, optimizer: Any) -> None:
        if policy.mode != "defer":
            return
        place, unknown = self._place_of(table), self._movements.unknown(optimizer)
        if self._is_traced_without and unknown is None:
            unknown = "an optimizer that the store was told of after a step had been traced"
        if policy.trigger == "movement" and unknown is not None:
            allowed = (
                f"Interval(...); or {self._movements.known}, given as "
                "VariableStore(..., optimizer=...) or by making the DistributedOptimizer with the "
                "store first"
            )
            raise invalid("until", "Movement", f"{place} with {unknown}", allowed)
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if steps:
            raise invalid("gradient_accumulation_steps", steps, f"{place} that defers", "None")

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
        keys = np.asarray(keys)
        if keys.size == 0:
            keys = keys.astype(np.int64)
        if keys.ndim != 1 or keys.dtype.kind not in "iu":
            described = f"{keys.dtype} {list(keys.shape)}"
            raise invalid("keys", described, f"table {table!r}", "integers [n]")
        self._require_in_range(table, keys)
        watched = self._watched[table]
        self.set_row_flags(table, keys, np.full(keys.size, SATURATED))
        if watched.policy.mode != "defer":
            watched.masked.assign(watched.saturated)

    def _require_in_range(self, table: str, keys: np.ndarray) -> None:
        outside = keys[(keys < 0) | (keys >= self.size(table))]
        if outside.size:
            allowed = f"0 to {self.size(table) - 1}"
            raise invalid("keys", int(outside[0]), f"table {table!r}", allowed)

    def _variable(self, table: str) -> tf.Variable:
        return self._variables[table]

    def num_keys(self, table: str) -> int:
        """See `SavedStore.num_keys`."""
        return self.size(table)

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
        """Returns all of a table as arrays, sorted by key; deferred gradients are not in.

        Args:
            table: name of the table.
            flush: must be false: deferred gradients leave with a step's only; see
                `flush_with_next_gradients`.

        Returns:
            As `NativeStore.export_table`; there are no slots, which are the optimizer's.

        Raises:
            ValueError: `flush` is true.
        """
        if flush:
            place = f"export_table of {self._place_of(table)}"
            raise invalid("flush", True, place, "False; distributed.flush_deferred applies sums")
        rows = self._variables[self._require(table)].numpy()
        return table_contents(np.arange(len(rows)), rows, counts=self._counts[table].numpy())

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces rows and access counts by what `export_table` of any store gave.

        Rows of keys that are not in the contents stay as they are, with a count of 0.

        Raises:
            ValueError: a key is out of range, or the rows have another dimension. Nothing is
                changed then.
        """
        keys, rows = np.asarray(contents["keys"], np.int64), np.asarray(contents["rows"])
        values = self._variables[self._require(table)].numpy()
        self._require_in_range(table, keys)
        for name in ("rows", "counts"):
            column = np.asarray(contents[name], np.float32).reshape(keys.size, -1)
            is_bad = ~np.isfinite(column) | ((column < 0) if name == "counts" else False)
            if is_bad.any():
                index, value = int(np.argwhere(is_bad)[0][0]), float(column[is_bad][0])
                where = f"key {int(keys[index])} of table {table!r}, at place {index}"
                raise invalid(name, value, where, "finite numbers; counts from 0")
        if rows.shape != (keys.size, values.shape[1]):
            raise invalid("rows", rows.shape, f"table {table!r}", f"{(keys.size, values.shape[1])}")
        values[keys] = rows
        counts = np.zeros(len(values), np.float32)
        counts[keys] = contents["counts"]
        self._variables[table].assign(values)
        self._counts[table].assign(counts)


def _checked(name: str, value: Any) -> tf.Variable:
    variable = tensorflow_variable(value)
    if variable is None:
        allowed = "a tf.Variable, or a Keras variable such as `layer.embeddings`"
        raise invalid("variables", type(value).__name__, f"table {name!r}", allowed)
    if variable.dtype != tf.float32 or variable.shape.rank != 2 or not variable.shape[0]:
        described = f"{variable.dtype.name} {variable.shape}"
        raise invalid("variables", described, f"table {name!r}", "float32 [rows >= 1, dim >= 1]")
    return variable
