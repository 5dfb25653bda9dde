"""Keras callbacks for counts, progress, timing, learning curves and early stopping.

They provide the entries "progress", "evaluations" and "validation" of metrics.json.
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
"""Name of the metric that replaces the loss in displays if examples have weights."""

_MONITORED = "val_auc"
# Minimum AUC gain that counts as an improvement. The order of floating-point sums in different
# threads can cause smaller differences.
_MIN_GAIN = 1e-6
_SECONDS_BETWEEN_UPDATES = 0.2
_MAX_POINTS = 100
SUMMED = ("examples_seen", "examples_trained")
"""The values of a curve point that are summed over ranks."""
_Point = dict[str, Any]


def shown_loss(logs: Mapping[str, Any]) -> float | None:
    """Returns the loss to display from Keras's logs, or None.

    If examples have weights, the loss is the weighted mean `LOG_LOSS`, which estimates the log loss
    of all examples. Keras's `loss` would grow with the weights.
    """
    value = logs.get(LOG_LOSS, logs.get("loss"))
    return None if value is None else float(value)


class InputCount(keras.metrics.Metric):
    """Counts the trained examples; examples with weight 0 do not count."""

    def __init__(self, name: str = "trained", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        # float32 cannot represent all integers above 16,777,216.
        self._count = self.add_variable(shape=(), initializer="zeros", dtype="int64", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the number of labels with a nonzero weight."""
        if sample_weight is None:
            self._count.assign_add(tf.shape(y_true, out_type=tf.int64)[0])
        else:
            self._count.assign_add(tf.math.count_nonzero(sample_weight))

    def result(self) -> Any:
        """Returns the count as an int64 scalar."""
        return tf.identity(self._count.value)


class StepCount(keras.callbacks.Callback):
    """Counts trained steps, including steps before a resume.

    Note: put it first in the list of callbacks, because other callbacks read the count.

    Attributes:
        steps: Number of trained steps, including the steps before a resume.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Updates the count.

        With `steps_per_execution` > 1, the optimizer's step count is read, because the last
        execution may have fewer steps.
        """
        if self.model.steps_per_execution == 1:
            self.steps += 1
        else:
            self.steps = int(self.model.optimizer.iterations.numpy())


class BarCallback(keras.callbacks.Callback):
    """Updates the progress bar during training.

    Args:
        bar: The progress bar.
        examples_seen: Function that returns the number of examples seen so far, including skipped
            examples. None if no examples are skipped.
    """

    def __init__(self, bar: TrainingBar, examples_seen: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._bar, self._inputs_seen = bar, examples_seen
        self._last = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Updates the bar, at most five times per second.

        Reading a value of `logs` takes time, so it is not done in every step.
        """
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
    """Measures the mean time per step after the first steps.

    The measurement ends with the training and includes `on_train_end` of earlier callbacks.

    Note: put it after all callbacks that belong to training, so that the measured time includes
    their work, for example at the end of a window.

    Args:
        count: Counter of the trained steps.
        untimed: Number of steps before the measurement, at least 1 because the first step traces
            the graphs.
    """

    def __init__(self, count: StepCount, untimed: int) -> None:
        super().__init__()
        self._count, self._untimed = count, untimed
        # Number of trained steps at the start of the measurement, or None before it.
        self._begun: int | None = None
        self._start = self._end = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock after the untimed steps."""
        if self._begun is None and self._count.steps >= self._untimed:
            self._begun, self._start = self._count.steps, time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """Excludes seconds from the measurement, for example the time of an evaluation."""
        self._start += seconds

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock."""
        self._end = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Returns the JSON-serializable state: first timed step and seconds since then."""
        return {"begun": self._begun, "seconds": time.perf_counter() - self._start}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the result of `state`. Call it after `on_train_begin`."""
        self._begun = state["begun"]
        self._start = time.perf_counter() - state["seconds"]

    @property
    def seconds_per_step(self) -> float | None:
        """Mean seconds per timed step, or None without timed steps."""
        timed = 0 if self._begun is None else self._count.steps - self._begun
        return (self._end - self._start) / timed if timed > 0 else None


class CurveCallback(keras.callbacks.Callback):
    """Records a learning curve and evaluates periodically.

    The curve has at most 100 evenly spaced points. A point is a dictionary with the state of this
    rank:

    - "step": number of trained steps.
    - "seconds": time since the start of training, without evaluations.
    - "examples_seen", "examples_trained": counts so far. Skipped examples count as seen.
    - "loss", "auc": means over all trained examples. Each example is measured before the step that
      trains it, therefore these values estimate the quality on new data in the first epoch.

    Args:
        count: Counter of the trained steps.
        examples_seen: Function that returns the number of examples seen so far.
        evaluate: Function that evaluates the model on the test part. In a job with multiple ranks
            it is a collective. Note: the store may flush deferred gradients during the call.
        evaluate_every: Steps between evaluations. None means no evaluations.
        exclude_seconds: Function that is called with the seconds of each evaluation.

    Attributes:
        evaluation_seconds: Total time of the evaluations.
    """

    def __init__(
        self,
        count: StepCount,
        examples_seen: Callable[[], int],
        evaluate: Callable[[], ClickMetrics],
        evaluate_every: int | None,
        exclude_seconds: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._count = count
        self._inputs_seen, self._exclude_seconds = examples_seen, exclude_seconds
        self._evaluate, self._evaluate_every = evaluate, evaluate_every
        self._points: list[_Point] = []
        self._evaluated: list[tuple[_Point, dict[str, Any]]] = []
        self._last: list[_Point] = []  # The point at the end of training.
        # Number of calls, and number of calls from one point to the next.
        self._calls, self._interval = 0, 1
        self._start = 0.0
        self.evaluation_seconds = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Records a point and evaluates at the configured steps.

        When there are too many points, every second point is removed and the interval doubles.
        """
        self._calls += 1
        if self._calls % self._interval == 0:
            self._points.append(self._point(logs or {}))
            if len(self._points) >= _MAX_POINTS:  # `entries` may add the last step.
                self._points = self._points[1::2]
                self._interval *= 2
        if self._evaluate_every is not None and self._count.steps % self._evaluate_every == 0:
            point, start = self._point(logs or {}), time.perf_counter()
            self._evaluated.append((point, self._evaluate().to_dict()))
            seconds = time.perf_counter() - start
            self.evaluation_seconds += seconds
            self._exclude_seconds(seconds)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the point at the end of training."""
        if logs and "loss" in logs:
            self._last = [self._point(logs)]

    def state(self) -> dict[str, Any]:
        """Returns the JSON-serializable state: all points, evaluations and times."""
        return {
            "places": list(self._points),
            "evaluated": list(self._evaluated),
            "calls": self._calls,
            "interval": self._interval,
            "seconds": time.perf_counter() - self._start,
            "evaluation_seconds": self.evaluation_seconds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the result of `state`. Call it after `on_train_begin`."""
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
        """Returns the record's entries "progress" and "evaluations". A collective.

        Counts are summed over ranks. Loss and AUC are means over ranks, weighted by trained
        examples. Seconds are from rank 0.

        Args:
            comm: The communicator of the job.
            final: Metrics at the end of training, which become the last evaluation.
            inputs: Counts "seen" and "trained" of the whole run.
        """
        own = [self._points, [point for point, _ in self._evaluated], self._last]
        ranks = gather_json(comm, own, "slipstream.curve")
        points, evaluated, last = (merged_points([own[part] for own in ranks]) for part in range(3))
        measured = [quality for _, quality in self._evaluated]
        for point in last:
            # The counts at the end are exact: they contain no examples that are read ahead.
            point.update(examples_seen=inputs["seen"], examples_trained=inputs["trained"])
            if evaluated and evaluated[-1]["step"] == point["step"]:
                # Replace the evaluation of the last step. Deferred gradients may have been applied
                # after it, so `final` is the valid one.
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
    """Merges the points of all ranks that belong to the same step.

    Counts are summed. Loss and AUC are means weighted by trained examples. Other values are from
    the first rank.

    Args:
        of_ranks: The points of each rank, in rank order. All ranks have points at the same steps.

    Returns:
        One point per step.
    """
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
    """Stops training early and reduces learning rates by validation AUC.

    The validation part is evaluated every `every` steps and at the end of training. The callback
    forwards each evaluation to `keras.callbacks.EarlyStopping` and `ReduceLROnPlateau` as if an
    epoch had ended. The learning rates of the rows change by the same factor as the rate of the
    dense layers.

    Args:
        count: Counter of the trained steps.
        settings: Settings with `early_stopping` and `plateau_factor`.
        measure: Function that applies deferred gradients and evaluates the model on the validation
            part. In a job with multiple ranks it is a collective and returns the same result on
            all ranks.
        every: Steps between evaluations.
        exclude_seconds: Function that is called with the seconds of each evaluation.

    Attributes:
        measured: Step, learning rate and metrics of each evaluation.
    """

    def __init__(
        self,
        count: StepCount,
        settings: Settings,
        measure: Callable[[], ClickMetrics],
        every: int,
        exclude_seconds: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._measure, self._every, self._exclude_seconds = measure, every, exclude_seconds
        self._count = count
        self.measured: list[dict[str, Any]] = []
        common: dict[str, Any] = {"mode": "max", "min_delta": _MIN_GAIN}
        self._stopper = keras.callbacks.EarlyStopping(
            _MONITORED, patience=settings.early_stopping, restore_best_weights=True, **common
        )
        self._parts = [self._stopper]
        if settings.plateau_factor < 1.0:
            self._parts.append(
                keras.callbacks.ReduceLROnPlateau(
                    _MONITORED, settings.plateau_factor, patience=1, **common
                )
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Initializes the Keras callbacks."""
        for part in self._parts:
            part.set_model(self.model)
            part.on_train_begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Evaluates every `every` steps."""
        if self._count.steps % self._every == 0:
            self._validate()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Evaluates at the end of training; a run is one Keras epoch."""
        if not self.measured or self.measured[-1]["step"] != self._count.steps:
            self._validate()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the best weights and rows."""
        start = time.perf_counter()
        for part in self._parts:
            part.on_train_end()
        self._exclude_seconds(time.perf_counter() - start)

    @property
    def best_step(self) -> int:
        """The step with the best AUC, whose weights are restored."""
        return int(self.measured[self._stopper.best_epoch]["step"])

    def _validate(self) -> None:
        start = time.perf_counter()
        quality = self._measure()
        if math.isnan(quality.auc):
            raise RunError(
                f"The validation part has {quality.clicks:,} clicks in {quality.examples:,} "
                "examples, so the AUC for --early_stopping is undefined. Expected clicks and "
                "non-clicks. Pass more data or --early_stopping=0."
            )
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.measured.append(
            {"step": self._count.steps, "learning_rate": rate, **quality.to_dict()}
        )
        for part in self._parts:
            part.on_epoch_end(len(self.measured) - 1, {_MONITORED: quality.auc})
        self._exclude_seconds(time.perf_counter() - start)
