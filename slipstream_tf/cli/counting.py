"""Counts inputs where they come in and where they are trained, and limits how many come in.

The two counts are taken apart, so that an input lost between them would show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf.distributed.batches import element_of
from slipstream_tf.keras import Slipstream
from slipstream_tf.telemetry.progress import TrainingBar

_compat.require_keras()

_SECONDS_BETWEEN_UPDATES = 0.2


def first_inputs(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Ends a dataset of batches after `count` inputs; the last batch may become smaller."""

    def cut(seen: tf.Tensor, batch: Any) -> Any:
        size = _size(batch)
        kept = tf.minimum(size, count - seen)
        return seen + kept, tf.nest.map_structure(lambda part: part[:kept], batch)

    limited = dataset.scan(tf.constant(0, tf.int64), cut)
    return limited.take_while(lambda *batch: _size(batch) > 0)


def counted(dataset: tf.data.Dataset, counter: tf.Variable) -> tf.data.Dataset:
    """Adds the size of every batch that passes to `counter`, an int64 variable on the CPU."""

    def count(*batch: Any) -> Any:
        with tf.control_dependencies([counter.assign_add(_size(batch))]):
            return tf.nest.map_structure(tf.identity, batch)

    return dataset.map(count)


def handed_out(
    dataset: tf.data.Dataset,
    seen: tf.Variable,
    pulled: tf.Variable,
    slipstream: Slipstream | None,
) -> tf.data.Dataset:
    """Notes in `pulled` what `seen` was when the batch that is pulled had been made.

    Args:
        dataset: of batches.
        seen, pulled: int64 variables on the CPU.
        slipstream: has batches made while the ones before train, if given; `seen` is ahead then.
    """
    spec = dataset.element_spec

    def note(*parts: Any) -> Any:
        return element_of(spec, parts), seen.read_value()

    def hand_out(batch: Any, count: tf.Tensor) -> Any:
        with tf.control_dependencies([pulled.assign(count)]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    noted = dataset.map(note)
    return (noted if slipstream is None else slipstream.read_ahead(noted)).map(hand_out)


def _size(batch: Any) -> tf.Tensor:
    _, label = batch
    return tf.shape(label, out_type=tf.int64)[0]


class InputCount(keras.metrics.Metric):
    """A metric that counts the inputs of the training steps."""

    def __init__(self, name: str = "trained", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        # float32 cannot count beyond 16,777,216.
        self._count = self.add_variable(shape=(), initializer="zeros", dtype="int64", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the number of labels."""
        del y_pred, sample_weight
        self._count.assign_add(tf.shape(y_true, out_type=tf.int64)[0])

    def result(self) -> Any:
        """Returns the count, int64."""
        return tf.identity(self._count.value)


class BarCallback(keras.callbacks.Callback):
    """Feeds the progress bar while `model.fit` runs.

    Args:
        bar: to update.
        inputs_seen: called for the number of inputs that came in so far; None where all of them are
            trained.
    """

    def __init__(self, bar: TrainingBar, inputs_seen: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._bar, self._inputs_seen = bar, inputs_seen
        self._last = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Updates the bar a few times a second; a value of `logs` costs time when it is read."""
        del batch
        now = time.perf_counter()
        if now - self._last >= _SECONDS_BETWEEN_UPDATES:
            self._last = now
            self._update(logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Shows the final state."""
        self._update(logs or {})

    def _update(self, logs: dict[str, Any]) -> None:
        loss, auc = (float(logs[n]) if n in logs else None for n in ("loss", "auc"))
        trained = int(logs["trained"]) if "trained" in logs else 0
        seen = self._inputs_seen() if self._inputs_seen else trained
        self._bar.update(seen, trained, loss, auc)


class StepTimer(keras.callbacks.Callback):
    """Takes the time of the steps of `model.fit` after the first ones, and of the end of training.

    Put it last: what other callbacks do at a step's end (a window's end, an exchange) is in it.

    Args:
        untimed: steps before, at least 1: the first one builds graphs.
    """

    def __init__(self, untimed: int) -> None:
        super().__init__()
        self._untimed = untimed
        self._steps = 0
        self._start = self._end = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts a step."""
        del batch, logs
        self._steps += 1
        if self._steps == self._untimed:
            self._start = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Does not count what took these seconds, within a step's end, as training."""
        if self._steps >= self._untimed:
            self._start += seconds

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock."""
        del logs
        self._end = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Returns the steps and the seconds so far, JSON-serialisable."""
        is_timed = self._steps >= self._untimed
        seconds = time.perf_counter() - self._start if is_timed else 0.0
        return {"steps": self._steps, "seconds": seconds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave, after training has begun."""
        self._steps = state["steps"]
        self._start = time.perf_counter() - state["seconds"]

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the timed steps; None without any."""
        timed = self._steps - self._untimed
        return (self._end - self._start) / timed if timed > 0 else None
