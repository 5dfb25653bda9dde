"""Learning rates of a store's tables: numbers, variables or schedules.

Rates that are numbers can follow the learning rate of the dense layers' optimizer. An update reads
one scalar for all tables, or one rate per table.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf.config import Table
from slipstream_tf.optimizers import SparseOptimizer, optimizer_of

_MAX_FACTOR = 10.0  # Maximum factor by which a followed dense rate may raise a table's rate.
_NOT_FOLLOWED = (
    "a finite rate > 0 near its maximum at the start of training. Otherwise, pass follow=False or "
    "a schedule to the optimizers of the tables"
)


class Rates:
    """The learning rates of all tables of a store.

    Tables without an `optimizer` setting share one rate.
    """

    def __init__(
        self, tables: Sequence[Table], optimizer: Any, step_of: Callable[[int], tf.Tensor]
    ):
        """Creates a variable for each rate that is a number.

        Args:
            tables: The tables of the store.
            optimizer: The sparse optimizer of tables that have no `optimizer` setting.
            step_of: Maps a table index to the table's number of updates so far, an int64 scalar.
                Schedules use it.
        """
        self.optimizers = tuple(optimizer_of(table, optimizer) for table in tables)
        self._names = [table.name for table in tables]
        self._step_of = step_of
        shared = None
        self._sources: list[Any] = []
        for table, own in zip(tables, self.optimizers, strict=True):
            if table.optimizer is not None:
                self._sources.append(_source_of(own, f"learning_rate_{table.name}"))
                continue
            if shared is None:
                shared = _source_of(own, "learning_rate")
            self._sources.append(shared)
        self._follows = [own.follows for own in self.optimizers]
        self._optimizer: Any = None  # The dense layers' optimizer.
        self._reference: Any = None  # The dense rate when the optimizer was first seen, a variable.
        # One reference per optimizer, because models may share a store.
        self._references: dict[int, tuple[Any, tf.Variable]] = {}
        self._restored_reference: float | None = None
        # The factor of the next update (see `await_optimizer`) and the first reference. They are
        # created here, because TensorFlow traces a function twice that creates variables.
        self._awaits_optimizer, self._first_reference = False, None
        # The optimizers with the learning rate of the latest update and of `_next_factor`.
        self._used_by: Any = None
        self._next_of: Any = None
        if any(self._follows):
            with tf.init_scope():
                self._next_factor = _scalar(1.0, "next_factor")
                self._first_reference = _scalar(1.0, "followed_rate")

    @property
    def shared(self) -> tf.Variable | None:
        """The learning rate variable that all tables share, a scalar, or None.

        None if the tables have separate rates or a schedule. The variable holds the rate before
        multiplication by `dense rate / reference` (see `follow`).
        """
        first = self._sources[0]
        is_one = all(source is first for source in self._sources)
        return first if is_one and isinstance(first, tf.Variable) else None

    @property
    def variables(self) -> list[tf.Variable]:
        """The distinct rate variables, without schedules."""
        found = {id(s): s for s in self._sources if isinstance(s, tf.Variable)}
        return list(found.values())

    def follow(self, optimizer: Any) -> None:
        """Sets the Keras optimizer that the rates follow.

        The rate of an optimizer when it is first passed is its reference. From then on, tables with
        `follow=True` and a number as their rate multiply it by `dense rate / reference`. The
        reference of a schedule is the target of its warm-up (`warmup_target`), or its value at step
        0 without a warm-up. The reference of a restored optimizer is the reference in the
        checkpoint.

        Args:
            optimizer: A Keras optimizer. None keeps the current optimizer, if any.

        Raises:
            ValueError: The reference of a schedule is not finite and positive, for example because
                the schedule starts at 0 and has no warm-up target.
        """
        optimizer = _compat.innermost_optimizer(optimizer)
        rate = _compat.dense_rate(optimizer)
        if rate is None or not any(self._follows):
            return
        seen, reference = self._references.get(id(optimizer), (lambda: None, None))
        if seen() is not optimizer:
            reference = self._new_reference(optimizer, rate)
        self._optimizer, self._reference = optimizer, reference

    def await_optimizer(self) -> None:
        """Prepares for an optimizer that is known only when it applies gradients.

        Call it before an update is traced. The update then reads its rate from a variable that
        `follow_applied` sets.
        """
        if self._optimizer is None and any(self._follows):
            self._awaits_optimizer = True

    def follow_applied(self, optimizer: Any) -> None:
        """Follows an optimizer that is known only while it applies gradients.

        Call it in each `apply`, before `iterations` increases. Steps that are traced before it use
        the learning rate that the optimizer has after this `apply`: schedules are followed
        exactly, and other changes of the rate take effect one step later.

        Args:
            optimizer: A Keras optimizer.

        Raises:
            ValueError: The first update did not use the learning rate of the optimizer, because
                the optimizer was not known yet, for example during the warm-up of a schedule.
        """
        optimizer = _compat.innermost_optimizer(optimizer)
        rate = _compat.dense_rate(optimizer)
        if rate is None or not any(self._follows):
            return
        self._require_used(optimizer)
        seen = self._references.get(id(optimizer))
        is_new = seen is None or seen[0]() is not optimizer
        self.follow(optimizer)
        if is_new:
            with tf.init_scope():
                factor = self._factor()
                self._next_factor.assign(factor)
            if tf.executing_eagerly() and float(factor) != 1.0:  # The update has already run.
                allowed = (
                    "a constant rate, or an optimizer that is known before the first step. Call "
                    "slip.keras.connect(layers, optimizer) before training"
                )
                place = f"the tables {self._names} in a training loop"
                raise invalid("learning_rate", type(rate).__name__, place, allowed)
        if self._awaits_optimizer:
            self._next_factor.assign(self._factor(ahead=1))
        self._next_of = weakref.ref(optimizer)

    def _require_used(self, optimizer: Any) -> None:
        """Raises ValueError if the update used the schedule of another optimizer."""
        of_update = self._used_by or self._next_of
        other = None if of_update is None else of_update()
        if other is None or other is optimizer:
            return
        if any(_compat.is_schedule(_compat.dense_rate(o)) for o in (other, optimizer)):
            used = f"the update used the learning rate of another {type(other).__name__}"
            place = f"the tables {self._names} with multiple optimizers, because {used}"
            allowed = (
                "a single optimizer, or optimizers without a schedule. Call "
                "slip.keras.connect(layers, optimizer) before training with another optimizer, or "
                "use apply='step' and slip.keras.CombinedOptimizer(optimizer)"
            )
            raise invalid("optimizer", type(optimizer).__name__, place, allowed)

    def _new_reference(self, optimizer: Any, rate: Any) -> tf.Variable:
        with tf.init_scope():
            value = _reference_of(rate)
            if self._restored_reference is not None and int(optimizer.iterations.numpy()) > 0:
                value = self._restored_reference
            self._restored_reference = None
            reference, self._first_reference = self._first_reference, None
            if reference is None:
                # A variable, because TensorFlow would multiply by a constant's rounded reciprocal.
                reference = _scalar(value, "followed_rate")
            reference.assign(value)
        alive = {k: found for k, found in self._references.items() if found[0]() is not None}
        self._references = {**alive, id(optimizer): (weakref.ref(optimizer), reference)}
        return reference

    def now(self, after: Any = ()) -> Any:
        """Returns the learning rates for an update.

        Args:
            after: Tensors of the step's lookup. Schedules are evaluated after these tensors, so
                that they see the update count of this step.

        Returns:
            float32, a scalar for all tables or [tables].
        """
        factor = self._next_factor if self._awaits_optimizer else None
        self._used_by = None
        if self._optimizer is not None:
            factor = self._factor()
            self._used_by = weakref.ref(self._optimizer)
        if self.shared is not None:
            return self._rate(0, factor, after)
        rates = [self._rate(index, factor, after) for index in range(len(self._sources))]
        return tf.stack([tf.convert_to_tensor(rate) for rate in rates])

    def of(self, table: int) -> float:
        """Returns the learning rate of a table's next update.

        Args:
            table: Index of the table.
        """
        factor = self._factor() if self._optimizer is not None else None
        return float(tf.convert_to_tensor(self._rate(table, factor, ())))

    def assign(self, table: int, rate: Any) -> None:
        """Sets the learning rate of a table, from the next update.

        All tables without an `optimizer` setting share one rate: if this table is one of them, the
        rates of the others change too.

        Args:
            table: Index of the table.
            rate: The rate of the next update, finite and at least 0. If the table follows the dense
                layers' optimizer, this is the rate after multiplication by `dense rate / reference`
                (see `follow`).

        Raises:
            ValueError: The table has a schedule, or the rate is negative or not finite.
        """
        source = self._sources[table]
        if _compat.is_schedule(source):
            place = f"table {self._names[table]!r} with a {type(source).__name__} schedule"
            allowed = "a table with a number as its learning rate, because a schedule sets the rate"
            raise invalid("learning_rate", rate, place, allowed)
        rate = require_rate(rate, f"table {self._names[table]!r}")
        follows = self._follows[table] and self._optimizer is not None
        source.assign(rate / float(self._factor()) if follows else rate)

    def _rate(self, index: int, factor: Any, after: Any) -> Any:
        source = self._sources[index]
        if _compat.is_schedule(source):
            with tf.control_dependencies(tf.nest.flatten(after)):
                return tf.cast(source(self._step_of(index)), tf.float32)
        if factor is not None and self._follows[index]:
            return source * factor
        return source if source.dtype == tf.float32 else tf.cast(source, tf.float32)

    def _factor(self, ahead: int = 0) -> tf.Tensor:
        """Returns the dense rate, `ahead` steps from now, divided by its reference.

        The factor is exactly 1 if the rate equals its reference, even if both are 0. The call fails
        if the factor exceeds `_MAX_FACTOR`. For example, a dense rate first seen at the start of
        its warm-up would raise the tables' rates far above the configured values.
        """
        iterations = _compat.schedule_step(self._optimizer)
        if ahead:
            iterations = tf.convert_to_tensor(iterations) + ahead
        rate = _dense_rate(_compat.dense_rate(self._optimizer), iterations)
        reference = self._reference.read_value()
        factor = tf.where(rate == reference, 1.0, rate / reference)
        details = (
            f"The learning rate of {type(self._optimizer).__name__} is more than "
            f"{_MAX_FACTOR:g} times its value at the start of training, and the tables "
            f"follow it. Expected {_NOT_FOLLOWED}."
        )
        # Not `tf.debugging.assert_less_equal`: its condition costs more than the rest of this
        # function.
        check = tf.raw_ops.Assert(condition=factor <= _MAX_FACTOR, data=[details])
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(factor)

    def export(self) -> dict[str, np.ndarray]:
        """Returns the rates to save in a checkpoint.

        Returns:
            "learning_rate": float32, a scalar for all tables or [tables], before multiplication by
                `dense rate / reference` (see `follow`). The current value for schedules.
            "followed_rate": float32 scalar, the reference; only if the rates follow an optimizer.
        """
        if self.shared is not None:
            rates = np.float32(self.shared.numpy())
        else:
            found = [self._rate(index, None, ()) for index in range(len(self._sources))]
            rates = np.array([float(tf.convert_to_tensor(rate)) for rate in found], np.float32)
        saved = {"learning_rate": np.asarray(rates)}
        if self._optimizer is not None:
            saved["followed_rate"] = np.asarray(self._reference.numpy(), np.float32)
        return saved

    def restore(self, saved: Mapping[str, Any], tables: Sequence[str] | None = None) -> None:
        """Restores rates that `export` returned.

        Schedules are not restored, because they depend only on the number of updates.

        Args:
            saved: Result of `export`.
            tables: Names of the tables in the order of the saved rates. None means this store's
                tables.
        """
        rates = np.asarray(saved["learning_rate"], np.float32)
        names = self._names if tables is None else list(tables)
        for name, source in zip(self._names, self._sources, strict=True):
            if name in names and not _compat.is_schedule(source):
                source.assign(rates[names.index(name)] if rates.ndim else rates)
        if saved.get("followed_rate") is not None and self._optimizer is None:
            self._restored_reference = float(saved["followed_rate"])


def _scalar(value: float, name: str) -> tf.Variable:
    return tf.Variable(value, trainable=False, dtype=tf.float32, name=name)


def require_rate(rate: Any, place: str) -> float:
    """Returns a rate as a float, and raises ValueError if invalid.

    Args:
        rate: A finite number of at least 0, also as a scalar tensor.
        place: Name of the table or layer, for the error.
    """
    number = rate.numpy() if hasattr(rate, "numpy") else rate
    return float(require_number("learning_rate", number, 0.0, place=place))


def _source_of(optimizer: SparseOptimizer, name: str) -> Any:
    """Returns the variable or the schedule of an optimizer's learning rate."""
    rate = optimizer.learning_rate
    if _compat.is_schedule(rate):
        return rate
    if not isinstance(rate, float):
        return _compat.tensorflow_variable(rate)
    return tf.Variable(rate, trainable=False, dtype=tf.float32, name=name)


def _dense_rate(rate: Any, iterations: Any) -> tf.Tensor:
    """Returns the current value of a dense rate, a float32 scalar."""
    if _compat.is_schedule(rate):
        rate = rate(tf.convert_to_tensor(iterations))
    elif callable(rate) and _compat.tensorflow_variable(rate) is None:
        rate = rate()
    return tf.cast(tf.convert_to_tensor(rate), tf.float32)


def _reference_of(rate: Any) -> float:
    """Returns the reference of a dense rate; see `Rates.follow`."""
    reference = float(_dense_rate(rate, 0))
    if _compat.is_schedule(rate):
        # During warm-up the rate is not representative, so take the warm-up's target.
        reference = float(getattr(rate, "warmup_target", None) or reference)
        if not (reference > 0.0 and math.isfinite(reference)):
            place = f"the tables that follow {type(rate).__name__}"
            raise invalid("learning_rate", reference, place, _NOT_FOLLOWED)
    return reference
