"""Optimizers of SOK variables: slots, steps, and movement of rows.

Maps an optimizer from `tables.sok.wrap_optimizer` to the equivalent sparse optimizer of this
package, exports and imports its rows, slots, steps and Adam powers, and computes how far it would
move a row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf import optimizers
from slipstream_tf._utils.errors import invalid
from slipstream_tf.tables.base import SlotLayout
from slipstream_tf.tables.sok.table import SokTable, slots_of
from slipstream_tf.tables.watching import Movements, inner_of

# SOK's slot names for this package's optimizers, in the slot order of native tables.
SLOTS: Mapping[str, tuple[str, ...]] = {"SGD": (), "Adagrad": ("accumulator",), "Adam": ("m", "v")}
# Number of steps after which a power of Adam's betas is 0 in float32.
_MANY_STEPS = 1 << 20


class SokRule:
    """Reads and writes the state of the optimizer of SOK variables.

    The state consists of slots, the number of updates, and Adam's powers.
    """

    def __init__(self, optimizer: Any) -> None:
        """Wraps an optimizer, or None if there is none."""
        self._optimizer = optimizer
        # `sok.SGD` has no slots and no `get_slot_names`.
        names: list[str] = getattr(optimizer, "get_slot_names", list)()
        self._name = _kind(optimizer)
        self._slots = tuple(sorted(names))
        if sorted(SLOTS.get(self._name, ())) == sorted(names):
            self._slots = SLOTS.get(self._name, ())
        else:
            # The slots differ from this package's optimizer, for example SGD with momentum.
            self._name = f"{self._name}({', '.join(self._slots)})"

    def layout(self, table: SokTable) -> SlotLayout:
        """Returns the layout of a table's slots.

        Its `rule` is None for a `sok.Variable` and without an optimizer.
        """
        if self._optimizer is None or not table.is_dynamic:
            return SlotLayout(None, np.empty(0, np.float32))
        return SlotLayout(
            self._name, np.repeat(np.array(self.initial_slots(), np.float32), table.dim)
        )

    def initial_slots(self) -> list[float]:
        """Returns the initial value of each slot, one number for all rows."""
        if not self._slots:
            return []
        made = self._optimizer._initial_vals
        return [float(np.ravel(made[name].numpy())[0]) for name in self._slots]

    def slots(self, table: SokTable) -> list[Any]:
        """Returns a table's slot variables, and creates them if necessary."""
        if self._optimizer is None or not table.is_dynamic or not self._slots:
            return []
        self._optimizer._create_slots([table.variable])
        slots = slots_of(self._optimizer, table.variable)
        return [slots[name] for name in self._slots]

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of updates and Adam's powers.

        Returns:
            steps: int64 [2], the number of updates, and 0 for the number of lookups. If the
                optimizer does not count updates, the number is computed from Adam's powers, and is
                0 without powers.
            powers: float32 [2], the values of `powers`. Empty for other optimizers than Adam.
        """
        steps = 0
        powers = [float(power.numpy()) for power in self.powers()]
        if hasattr(self._optimizer, "_iterations"):
            steps = int(self._optimizer._iterations.numpy())
        elif powers:
            beta, power = self.betas()[-1], powers[-1]
            steps = _MANY_STEPS
            if 0.0 < beta < 1.0 and power > 0.0:
                steps = max(round(math.log(power) / math.log(beta)) - 1, 0)
        return np.array([steps, 0]), np.array(powers, np.float32)

    def replace(self, contents: Mapping[str, Any]) -> None:
        """Sets the number of updates and Adam's powers.

        Args:
            contents: Contents of a table from any store, with "steps" and possibly "powers".
                Missing powers are computed from the number of updates.
        """
        steps, own = int(contents["steps"][0]), self.powers()
        if hasattr(self._optimizer, "_iterations"):
            self._optimizer._iterations.assign(steps)
        powers = contents.get("powers")
        if powers is None or len(powers) != len(own):
            # The contents have no powers, or the powers of another kind of optimizer.
            powers = [beta ** (steps + 1) for beta in self.betas()]
        for variable, value in zip(own, powers, strict=True):
            variable.assign(value)

    def powers(self) -> list[Any]:
        """Returns Adam's power variables, beta ** (updates + 1), in order.

        Only Adam of `tf.compat.v1.train` has them. The list is empty for other optimizers.
        """
        by_name = getattr(self._optimizer, "_non_slot_dict", {}) if self._name == "Adam" else {}
        return [power for _, power in sorted(by_name.items(), key=lambda item: item[0][0])]

    def betas(self) -> list[float]:
        """Returns Adam's betas in the order of `powers`, or [] without powers."""
        if not self.powers():
            return []
        inner = inner_of(self._optimizer)
        values = (inner._call_if_callable(beta) for beta in (inner._beta1, inner._beta2))
        return [float(value) for value in values]

    def export_rows(self, found: SokTable) -> dict[str, np.ndarray]:
        """Returns this rank's rows and slots; SOK creates missing slots.

        Args:
            found: The table.

        Returns:
            "keys": int64 [n], ascending.
            "rows": float32 [n, dim].
            "slots": float32 [n, slots * dim].
        """
        if found.is_dynamic:
            keys, rows = (part.numpy() for part in found.sok.export(found.variable))
        else:
            keys, rows = found.keys_of(np.arange(found.size())), found.variable.numpy()
        order = np.argsort(keys)
        keys, rows = keys[order], rows[order]
        parts = [slot.sparse_read(tf.constant(keys)).numpy() for slot in self.slots(found)]
        joined = np.concatenate([np.empty((keys.size, 0), np.float32), *parts], axis=1)
        return {"keys": keys, "rows": rows, "slots": joined}

    def own_part(
        self, found: SokTable, contents: Mapping[str, Any], optional: Sequence[str] = ()
    ) -> dict[str, np.ndarray]:
        """Returns the part of the contents that belongs to this rank's keys.

        Args:
            found: The table.
            contents: "keys", "rows" and "slots" of keys of any rank.
            optional: Names of other arrays with one row per key, which may be missing.

        Raises:
            ValueError: A shape does not match the table, or SOK reserves a key.
        """
        keys, place = np.asarray(contents["keys"], np.int64), f"table {found.name!r}"
        slots_per_row = len(self.slots(found)) * found.dim
        for name, columns in (("rows", found.dim), ("slots", slots_per_row)):
            shape = np.shape(contents[name])
            if shape != (keys.size, columns):
                raise invalid(name, list(shape), place, f"the shape [{keys.size}, {columns}]")
        is_reserved = np.isin(keys, found.reserved_keys)
        if is_reserved.any():
            reserved = ", ".join(map(str, found.reserved_keys))
            allowed = f"keys other than {reserved}, because SOK reserves them"
            raise invalid("keys", int(keys[is_reserved][0]), place, allowed)
        is_own = found.owners(keys) == found.rank
        names = ["keys", "rows", "slots", *(name for name in optional if name in contents)]
        return {name: np.asarray(contents[name])[is_own] for name in names}

    def replace_rows(self, found: SokTable, own: Mapping[str, np.ndarray]) -> None:
        """Writes rows and slots, and resets the other keys of the table.

        SOK cannot remove keys, so keys that are not in `own` are set to their initial
        values. Exception: keys of a `sok.Variable`, and keys with random initial rows, stay
        unchanged.

        Args:
            found: The table.
            own: "keys", "rows" and "slots" of this rank's keys.

        Raises:
            RuntimeError: The table is too small, and SOK evicted some of the written rows.
        """
        keys = own["keys"]
        if not found.is_dynamic:
            rows = found.variable.numpy()
            rows[found.indices(keys)] = own["rows"]
            found.variable.assign(rows)
            return
        variables, initial = (found.variable, *self.slots(found)), found.initial_value
        others = np.setdiff1d(found.sok.export(found.variable)[0].numpy(), keys)
        if initial is None and others.size:
            logging.warning(
                "Table %r keeps the rows of %d keys that the loaded contents do not have, because "
                "SOK can neither remove keys nor restore their random initial rows. Load into a "
                "new variable to start without these keys.",
                found.name,
                others.size,
            )
        elif initial is not None:
            # Reset these keys before the others are written, because the last written are evicted
            # last.
            for variable, value in zip(variables, (initial, *self.initial_slots()), strict=True):
                rows = tf.fill([others.size, found.dim], np.float32(value))
                found.sok.assign(variable, tf.constant(others, tf.int64), rows)
        columns = np.split(np.concatenate([own["rows"], own["slots"]], 1), len(variables), 1)
        for variable, values in zip(variables, columns, strict=True):
            found.sok.assign(variable, tf.constant(keys), tf.constant(values, tf.float32))
        if found.size() < keys.size + others.size:
            _require_rows(found, keys)


def _require_rows(found: SokTable, keys: np.ndarray) -> None:
    """Raises RuntimeError if SOK evicted rows that were just written."""
    present = found.sok.export(found.variable)[0].numpy()
    lost = np.setdiff1d(keys, present)
    if lost.size:
        raise RuntimeError(
            f"Table {found.name!r} has no room for {keys.size} loaded rows on rank {found.rank}. "
            f"SOK evicted {lost.size} of these rows, for example key {lost[0]}, and may have "
            "evicted other rows. Increase the capacity of the table, and load into a new store."
        )
    logging.warning(
        "Table %r has no room for both its old rows and the loaded rows, so that SOK evicted old "
        "rows. Increase the capacity of the table to keep all rows.",
        found.name,
    )


def same_rule(optimizer: optimizers.SparseOptimizer, rate: Callable[[], tf.Tensor]) -> Any:
    """Returns the `tf.compat.v1.train` optimizer with the same update optimizer.

    Args:
        optimizer: A sparse optimizer of this package.
        rate: Returns the current learning rate.

    Raises:
        ValueError: SOK's tables do not support the optimizer.
    """
    first = tf.compat.v1.train
    kind = type(optimizer)
    if optimizer.op_transforms():
        allowed = "an optimizer without l2, clip_value, clip_norm, weight_decay and max_norm"
        raise invalid("optimizer", optimizer, "SOK's tables", allowed)

    if kind is optimizers.SGD and not optimizer.slots_per_row(1):
        return first.GradientDescentOptimizer(rate)
    if isinstance(optimizer, optimizers.Adagrad) and kind is optimizers.Adagrad:
        start = optimizer.initial_accumulator_value
        # TensorFlow's Adagrad has no epsilon. It can be ignored only if it is tiny compared with
        # the accumulator.
        if not start > 0.0 or optimizer.epsilon > 1e-5 * start:
            allowed = (
                "Adagrad with initial_accumulator_value > 0 and epsilon <= 1e-5 * "
                "initial_accumulator_value"
            )
            raise invalid("optimizer", optimizer, "SOK's tables", allowed)
        return first.AdagradOptimizer(rate, start)
    if isinstance(optimizer, optimizers.Adam) and optimizer.bias_correction == "table":
        return first.AdamOptimizer(rate, optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
    allowed = "SGD without momentum, Adagrad, or Adam with bias_correction='table'"
    raise invalid("optimizer", optimizer, "SOK's tables", allowed)


class SokMovements(Movements):
    """Movements of optimizers of SOK's dynamic variables.

    Adagrad's accumulators are read from SOK's slot tables.
    """

    known = (
        "tf.compat.v1.train.GradientDescentOptimizer or AdagradOptimizer, sok.SGD, or "
        "tf_keras.optimizers.legacy.SGD without momentum or Adagrad"
    )
    _excluded_settings = ("_momentum",)
    # Packages in which classes of these names have the known update rules.
    _makers = ("tensorflow", "keras", "tf_keras", "sparse_operation_kit")

    def prepare(self, optimizer: Any, variables: list[Any]) -> None:
        """Creates the state that `of` reads, because a graph cannot create it.

        Args:
            optimizer: A supported optimizer.
            variables: The `sok.DynamicVariable`s that it updates.
        """
        inner = inner_of(optimizer)
        with tf.init_scope():
            if hasattr(inner, "_create_hypers"):
                inner._create_hypers()
            if self.rule(optimizer) == "Adagrad":
                optimizer._create_slots(variables)

    def learning_rate(self, optimizer: Any) -> tf.Tensor:
        inner = inner_of(optimizer)
        if inner is optimizer:  # `sok.SGD`
            return tf.cast(optimizer.lr, tf.float32)
        if not hasattr(inner, "_get_hyper"):  # `tf.compat.v1.train`
            return tf.cast(inner._call_if_callable(inner._learning_rate), tf.float32)
        # The formula of legacy optimizers, with the wrapper's count of updates.
        steps = tf.cast(optimizer._iterations, tf.float32)
        rate = inner._get_hyper("learning_rate", tf.float32)
        if callable(rate):
            rate = tf.cast(rate(steps), tf.float32)
        return rate / (1.0 + inner._initial_decay * steps)

    def rule(self, optimizer: Any) -> str | None:
        kind, maker = _kind(optimizer), type(inner_of(optimizer)).__module__.split(".")[0]
        return kind if kind in ("SGD", "Adagrad") and maker in self._makers else None

    def _by_adagrad(
        self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor
    ) -> tf.Tensor:
        # This read creates missing slots, with the same values as the optimizer's first update of
        # the key would. There are never more slots than keys of the variable.
        accumulated = slots_of(optimizer, variable)["accumulator"].sparse_read(keys)
        epsilon = getattr(inner_of(optimizer), "epsilon", 0.0)
        roots = tf.sqrt(accumulated + tf.square(sums)) + epsilon
        return tf.reduce_max(tf.math.divide_no_nan(tf.abs(sums), roots), axis=1)


def _kind(optimizer: Any) -> str:
    """Returns the corresponding class name in this package, for example "SGD"."""
    kind = type(inner_of(optimizer)).__name__.removesuffix("Optimizer")
    return "SGD" if kind == "GradientDescent" else kind
