"""Keras callbacks of a run: counts, progress bar, step time, curve, early stopping.

In: the steps of `model.fit`. Out: the entries "progress", "evaluations" and "validation" of
metrics.json, the counts and the times; the weights and rows of the best measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf._utils.agreement import gather_json
from slipstream_tf.cli.flag_set import RunError
from slipstream_tf.cli.settings import Settings
from slipstream_tf.distributed import Communicator
from slipstream_tf.telemetry.metrics import ClickMetrics
from slipstream_tf.telemetry.progress import TrainingBar

LOG_LOSS = "log_loss"
"""Name of the metric that is shown as the loss where examples have weights."""

_MONITORED = "val_auc"
# What counts as better; a sum over other threads may differ by less.
_LEAST_GAIN = 1e-6
_SECONDS_BETWEEN_UPDATES = 0.2
_MOST_POINTS = 100
SUMMED = ("examples_seen", "examples_trained")
"""What is summed over ranks, of a point of the curve."""
_Point = dict[str, Any]


def shown_loss(logs: Mapping[str, Any]) -> float | None:
    """Returns the loss among Keras's logs, that of all examples where some stand for others."""
    value = logs.get(LOG_LOSS, logs.get("loss"))
    return None if value is None else float(value)


class InputCount(keras.metrics.Metric):
    """A metric that counts the examples of the training steps."""

    def __init__(self, name: str = "trained", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        # float32 cannot count beyond 16,777,216.
        self._count = self.add_variable(shape=(), initializer="zeros", dtype="int64", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the number of labels whose weight is not 0."""
        if sample_weight is None:
            self._count.assign_add(tf.shape(y_true, out_type=tf.int64)[0])
        else:
            self._count.assign_add(tf.math.count_nonzero(sample_weight))

    def result(self) -> Any:
        """Returns the count, int64."""
        return tf.identity(self._count.value)


class StepCount(keras.callbacks.Callback):
    """Counts the steps that are trained; put it first.

    Attributes:
        steps: of the run so far, those before it was resumed included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts a step, or those of an execution: of the last one maybe fewer."""
        if self.model.steps_per_execution == 1:
            self.steps += 1
        else:
            self.steps = int(self.model.optimizer.iterations.numpy())


class BarCallback(keras.callbacks.Callback):
    """Feeds the progress bar while `model.fit` runs.

    Args:
        bar: to update.
        examples_seen: called for the number of examples that came in so far; None where all of them
            are trained.
    """

    def __init__(self, bar: TrainingBar, examples_seen: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._bar, self._inputs_seen = bar, examples_seen
        self._last = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Updates the bar a few times a second; a value of `logs` costs time when it is read."""
        now = time.perf_counter()
        if now - self._last >= _SECONDS_BETWEEN_UPDATES:
            self._last = now
            self._update(logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Shows the final state."""
        self._update(logs or {})

    def _update(self, logs: dict[str, Any]) -> None:
        loss, auc = shown_loss(logs), float(logs["auc"]) if "auc" in logs else None
        trained = int(logs["trained"]) if "trained" in logs else 0
        seen = self._inputs_seen() if self._inputs_seen else trained
        self._bar.update(seen, trained, loss, auc)


class StepTimer(keras.callbacks.Callback):
    """Takes the time of the steps of `model.fit` after the first ones, and of the end of training.

    Put it last: what other callbacks do at a step's end (a window's end, an exchange) is in it.

    Args:
        count: of the steps.
        untimed: steps before, at least 1: the first one builds graphs.
    """

    def __init__(self, count: StepCount, untimed: int) -> None:
        super().__init__()
        self._count, self._untimed = count, untimed
        # Trained steps when the clock was started.
        self._begun: int | None = None
        self._start = self._end = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock, where it is time to."""
        if self._begun is None and self._count.steps >= self._untimed:
            self._begun, self._start = self._count.steps, time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Does not count what took these seconds, within a step's end, as training."""
        self._start += seconds

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock."""
        self._end = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Returns the steps and the seconds so far, JSON-serialisable."""
        return {"begun": self._begun, "seconds": time.perf_counter() - self._start}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave, after training has begun."""
        self._begun = state["begun"]
        self._start = time.perf_counter() - state["seconds"]

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the timed steps; None without any."""
        timed = 0 if self._begun is None else self._count.steps - self._begun
        return (self._end - self._start) / timed if timed > 0 else None


class CurveCallback(keras.callbacks.Callback):
    """Notes up to 100 points along `model.fit`, evenly spaced, and evaluates at some steps.

    A point is where training stands on this rank. step: trained steps. seconds: since `fit` began,
    without evaluations. examples_seen, examples_trained: as the record has them at the end; what is
    read ahead counts as seen. loss, auc: of all examples trained so far, each before the step that
    trained it.

    Args:
        count: of the steps.
        examples_seen: called for the number of examples that came in so far.
        evaluate: measures the model on the test part; with several ranks a collective. A store may
            flush deferred gradients before.
        evaluate_every: steps between evaluations; None: there are none.
        left_out: called with the seconds that an evaluation took.
    """

    def __init__(
        self,
        count: StepCount,
        examples_seen: Callable[[], int],
        evaluate: Callable[[], ClickMetrics],
        evaluate_every: int | None,
        left_out: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._count = count
        self._inputs_seen, self._left_out = examples_seen, left_out
        self._evaluate, self._evaluate_every = evaluate, evaluate_every
        self._points: list[_Point] = []
        self._evaluated: list[tuple[_Point, dict[str, Any]]] = []
        self._last: list[_Point] = []  # Where training ended.
        # Executions, and how many of them lie between points.
        self._calls, self._interval = 0, 1
        self._start = 0.0
        self.evaluation_seconds = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the point, or evaluates, where it is time to."""
        self._calls += 1
        if self._calls % self._interval == 0:
            self._points.append(self._point(logs or {}))
            if len(self._points) > _MOST_POINTS:
                self._points = self._points[1::2]
                self._interval *= 2
        if self._evaluate_every is not None and self._count.steps % self._evaluate_every == 0:
            point, start = self._point(logs or {}), time.perf_counter()
            self._evaluated.append((point, self._evaluate().to_dict()))
            seconds = time.perf_counter() - start
            self.evaluation_seconds += seconds
            self._left_out(seconds)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers where training ended."""
        if logs and "loss" in logs:
            self._last = [self._point(logs)]

    def state(self) -> dict[str, Any]:
        """Returns all notes so far, JSON-serialisable."""
        return {
            "places": list(self._points),
            "evaluated": list(self._evaluated),
            "calls": self._calls,
            "interval": self._interval,
            "seconds": time.perf_counter() - self._start,
            "evaluation_seconds": self.evaluation_seconds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave, after training has begun."""
        self._points, self._evaluated = list(state["places"]), list(state["evaluated"])
        self._calls, self._interval = state["calls"], state["interval"]
        self._start = time.perf_counter() - state["seconds"]
        self.evaluation_seconds = state["evaluation_seconds"]

    def _point(self, logs: Mapping[str, Any]) -> _Point:
        return {
            "step": self._count.steps,
            "seconds": time.perf_counter() - self._start - self.evaluation_seconds,
            "examples_seen": self._inputs_seen(),
            "examples_trained": int(logs["trained"]),
            "loss": shown_loss(logs),
            "auc": float(logs["auc"]),
        }

    def entries(
        self, comm: Communicator, final: ClickMetrics, inputs: Mapping[str, int]
    ) -> dict[str, list[dict[str, Any]]]:
        """Returns the record's entries; a collective.

        Args:
            comm: the ranks. Counts are summed over them, loss and AUC are means of the ranks' own
                by trained examples, seconds are rank 0's.
            final: the quality at the end, which becomes the last evaluation.
            inputs: seen and trained, of the whole run.
        """
        own = [self._points, [point for point, _ in self._evaluated], self._last]
        ranks = gather_json(comm, own, "slipstream.curve")
        points, evaluated, last = (merged_points([own[part] for own in ranks]) for part in range(3))
        measured = [quality for _, quality in self._evaluated]
        for point in last:
            # After the last step nothing is on its way; rank 0 stopped its clock here.
            point.update(examples_seen=inputs["seen"], examples_trained=inputs["trained"])
            if evaluated and evaluated[-1]["step"] == point["step"]:
                # Deferred gradients have been flushed since.
                evaluated.pop()
                measured.pop()
            evaluated.append(point)
            measured.append(final.to_dict())
            if not points or points[-1]["step"] < point["step"]:
                points.append(point)
        keys = ("step", "seconds", *SUMMED)
        pairs = zip(evaluated, measured, strict=True)
        evaluations = [{**{key: point[key] for key in keys}, **found} for point, found in pairs]
        return {"progress": points, "evaluations": evaluations}


def merged_points(of_ranks: Sequence[Sequence[_Point]]) -> list[_Point]:
    """Puts the ranks' points of the same steps together."""
    merged = []
    for points in zip(*of_ranks, strict=True):
        whole = {**points[0], **{name: sum(point[name] for point in points) for name in SUMMED}}
        trained = [point for point in points if point["examples_trained"]]
        for name in ("loss", "auc") if trained else ():
            parts = (point["examples_trained"] * point[name] for point in trained)
            whole[name] = sum(parts) / whole["examples_trained"]
        merged.append(whole)
    return merged


class Validation(keras.callbacks.Callback):
    """Measures the validation part every so many steps, and once more at the end of training.

    `keras.callbacks.EarlyStopping` and `ReduceLROnPlateau` see a measurement as an epoch's end.
    Rows' rates follow the dense layers'.

    Args:
        count: of the steps.
        settings: `early_stopping` and `plateau_factor`.
        measure: measures the model on the validation part, with all deferred gradients applied;
            with several ranks a collective, whose result all have.
        every: steps between measurements.
        left_out: called with the seconds that a measurement took.

    Attributes:
        measured: step and quality of each measurement.
        best_step: the step whose weights and rows training ends with.
    """

    def __init__(
        self,
        count: StepCount,
        settings: Settings,
        measure: Callable[[], ClickMetrics],
        every: int,
        left_out: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._measure, self._every, self._left_out = measure, every, left_out
        self._count = count
        self.measured: list[dict[str, Any]] = []
        common: dict[str, Any] = {"mode": "max", "min_delta": _LEAST_GAIN}
        self._stopper = keras.callbacks.EarlyStopping(
            _MONITORED, patience=settings.early_stopping, restore_best_weights=True, **common
        )
        # In this order: a step that ends training needs no other rate.
        self._parts = [self._stopper]
        if settings.plateau_factor < 1.0:
            self._parts.append(
                keras.callbacks.ReduceLROnPlateau(
                    _MONITORED, settings.plateau_factor, patience=1, **common
                )
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to watch."""
        for part in self._parts:
            part.set_model(self.model)
            part.on_train_begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Measures, where it is time to."""
        if self._count.steps % self._every == 0:
            self._validate()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measures where training ended; the run is one epoch."""
        if not self.measured or self.measured[-1]["step"] != self._count.steps:
            self._validate()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Brings back the best weights and rows."""
        start = time.perf_counter()
        for part in self._parts:
            part.on_train_end()
        self._left_out(time.perf_counter() - start)

    @property
    def best_step(self) -> int:
        return int(self.measured[self._stopper.best_epoch]["step"])

    def _validate(self) -> None:
        start = time.perf_counter()
        quality = self._measure()
        if math.isnan(quality.auc):
            raise RunError(
                f"The validation part has {quality.clicks:,} clicks in {quality.examples:,} "
                "examples: there is no AUC to stop by. Allowed: examples of both kinds."
            )
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.measured.append(
            {"step": self._count.steps, "learning_rate": rate, **quality.to_dict()}
        )
        for part in self._parts:
            part.on_epoch_end(len(self.measured) - 1, {_MONITORED: quality.auc})
        self._left_out(time.perf_counter() - start)
