"""The learning rates of a store's tables: numbers, variables or schedules.

In: each table's rule, and the optimizer of the dense layers, which rates that are numbers follow.
Out: what an update reads, a scalar for all tables or a rate for each.
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
from slipstream_tf.optimizers import SparseOptimizer, rule_of

_MOST = 10.0  # times its own rate that a table may follow a dense rate to
_NOT_FOLLOWED = (
    "near its highest when training begins; or follow=False, or a schedule of the tables' own"
)


class Rates:
    """What each table's rows move by. Tables without an optimizer of their own share a rate."""

    def __init__(
        self, tables: Sequence[Table], optimizer: Any, step_of: Callable[[int], tf.Tensor]
    ):
        """Makes a variable of each rate that is a number.

        Args:
            tables: of the store.
            optimizer: of the tables without one of their own.
            step_of: index of a table -> its updates so far, int64 scalar; for schedules.
        """
        self.rules: tuple[SparseOptimizer, ...] = tuple(rule_of(t, optimizer) for t in tables)
        self._names = [table.name for table in tables]
        self._step_of = step_of
        shared = None
        self._sources: list[Any] = []
        for table, rule in zip(tables, self.rules, strict=True):
            if table.optimizer is not None:
                self._sources.append(_source_of(rule, f"learning_rate_{table.name}"))
                continue
            if shared is None:
                shared = _source_of(rule, "learning_rate")
            self._sources.append(shared)
        self._follows = [rule.follows for rule in self.rules]
        self._optimizer: Any = None  # of the dense layers
        self._reference: Any = None  # its rate when it was seen first, a variable
        # Of each optimizer that was seen: models may share a store.
        self._references: dict[int, tuple[Any, tf.Variable]] = {}
        self._restored_reference: float | None = None

    @property
    def shared(self) -> tf.Variable | None:
        """The variable that all tables' rates are, before they follow; None: there are several."""
        first = self._sources[0]
        is_one = all(source is first for source in self._sources)
        return first if is_one and isinstance(first, tf.Variable) else None

    @property
    def variables(self) -> list[tf.Variable]:
        """The rates that are no schedules, each once."""
        found = {id(s): s for s in self._sources if isinstance(s, tf.Variable)}
        return list(found.values())

    def follow(self, optimizer: Any) -> None:
        """Says which optimizer of Keras the rates follow; None: none, or as before.

        The first time that an optimizer is seen, its rate is what later ones are compared with: of
        a schedule its value at step 0, or the end of its warm-up; of a restored optimizer what the
        restored tables followed.

        Raises:
            ValueError: a schedule starts at 0.
        """
        rate = _compat.dense_rate(optimizer)
        if rate is None or not any(self._follows):
            return
        seen, reference = self._references.get(id(optimizer), (lambda: None, None))
        if seen() is not optimizer:
            reference = self._new_reference(optimizer, rate)
        self._optimizer, self._reference = optimizer, reference

    def _new_reference(self, optimizer: Any, rate: Any) -> tf.Variable:
        with tf.init_scope():
            value = _reference_of(rate)
            if self._restored_reference is not None and int(optimizer.iterations) > 0:
                value = self._restored_reference
            self._restored_reference = None
            # A variable: TensorFlow would multiply by a constant's rounded reciprocal.
            reference = tf.Variable(value, trainable=False, dtype=tf.float32, name="followed_rate")
        alive = {k: found for k, found in self._references.items() if found[0]() is not None}
        self._references = {**alive, id(optimizer): (weakref.ref(optimizer), reference)}
        return reference

    def now(self, after: Any = ()) -> Any:
        """Returns what an update reads: float32, a scalar for all tables or [tables].

        Args:
            after: tensors that come before schedules are asked: those of the step's lookup.
        """
        factor = None if self._optimizer is None else self._factor()
        if self.shared is not None:
            return self._rate(0, factor, after)
        rates = [self._rate(index, factor, after) for index in range(len(self._sources))]
        return tf.stack([tf.convert_to_tensor(rate) for rate in rates])

    def of(self, table: int) -> float:
        """Returns the rate of a table's next update."""
        factor = self._factor() if self._optimizer is not None else None
        return float(tf.convert_to_tensor(self._rate(table, factor, ())))

    def assign(self, table: int, rate: Any) -> None:
        """Sets the rate of a table, and of those that share it, from the next update on.

        Raises:
            ValueError: the rate is a schedule's, or what is given is no rate.
        """
        source = self._sources[table]
        if _compat.is_schedule(source):
            place = f"table {self._names[table]!r} with a {type(source).__name__}"
            raise invalid("learning_rate", rate, place, "a table whose rate is a number")
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

    def _factor(self) -> tf.Tensor:
        """The dense rate over what it was; exactly 1 where it is as it was, 0 included.

        A dense rate that has warmed up would take the tables far above the rate that they were
        given.
        """
        rate = _dense_rate(_compat.dense_rate(self._optimizer), self._optimizer.iterations)
        reference = self._reference.read_value()
        factor = tf.where(rate == reference, 1.0, rate / reference)
        told = (
            f"The learning rate of {type(self._optimizer).__name__} is more than {_MOST:g} times "
            f"what it was when training began, and tables follow it. Allowed: {_NOT_FOLLOWED}"
        )
        # Not of `tf.debugging`, whose condition costs every step more than all the rest.
        check = tf.raw_ops.Assert(condition=factor <= _MOST, data=[told])
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(factor)

    def export(self) -> dict[str, np.ndarray]:
        """Returns the rates to be saved.

        Returns:
            "learning_rate": float32, a scalar for all tables or [tables], before they follow; of
            schedules what they say now. "followed_rate": float32 scalar, where rates follow one.
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
        """Takes over what `export` gave; schedules go by their table's updates.

        Args:
            saved: as `export` gave it.
            tables: that the rates were saved of, in order; None: those here.
        """
        rates = np.asarray(saved["learning_rate"], np.float32)
        names = self._names if tables is None else list(tables)
        for name, source in zip(self._names, self._sources, strict=True):
            if name in names and not _compat.is_schedule(source):
                source.assign(rates[names.index(name)] if rates.ndim else rates)
        if saved.get("followed_rate") is not None and self._optimizer is None:
            self._restored_reference = float(saved["followed_rate"])


def require_rate(rate: Any, place: str) -> float:
    """Raises ValueError unless a rate is a finite number of at least 0, a tensor's too."""
    number = rate.numpy() if hasattr(rate, "numpy") else rate
    return float(require_number("learning_rate", number, 0.0, place=place))


def _source_of(rule: SparseOptimizer, name: str) -> Any:
    """The variable of a rate, or its schedule."""
    rate = rule.learning_rate
    if _compat.is_schedule(rate):
        return rate
    if not isinstance(rate, float):
        return _compat.tensorflow_variable(rate)
    return tf.Variable(rate, trainable=False, dtype=tf.float32, name=name)


def _dense_rate(rate: Any, iterations: Any) -> tf.Tensor:
    """A dense rate as it is now, float32 scalar."""
    if _compat.is_schedule(rate):
        rate = rate(tf.convert_to_tensor(iterations))
    elif callable(rate) and _compat.tensorflow_variable(rate) is None:
        rate = rate()
    return tf.cast(tf.convert_to_tensor(rate), tf.float32)


def _reference_of(rate: Any) -> float:
    """What a dense rate is compared with."""
    reference = float(_dense_rate(rate, 0))
    if _compat.is_schedule(rate):
        # A warm-up rises to what the schedule is about.
        reference = float(getattr(rate, "warmup_target", None) or reference)
        if not (reference > 0.0 and math.isfinite(reference)):
            place = f"the tables that follow {type(rate).__name__}"
            raise invalid("learning_rate", reference, place, _NOT_FOLLOWED)
    return reference
