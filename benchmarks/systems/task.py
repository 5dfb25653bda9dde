"""Task, evaluation and record, shared by all compared systems. Requires only NumPy.

The training part is one binary file with examples in training order. An example consists of int32
keys, float32 numbers and a float32 label. A batch is a contiguous block, so that every system can
read it with a single read operation of its framework.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Maps int32 keys [n, fields] and float32 numbers [n, numbers] to float32 logits [n].
Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]
_MEASURED_AT_ONCE = 8192


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of examples.

    Attributes:
        keys: Keys, int32 [n, fields], numbered from 0 in each field.
        dense: Numeric features, float32 [n, numbers].
        labels: Labels, float32 [n], 0 or 1.
    """

    keys: np.ndarray
    dense: np.ndarray
    labels: np.ndarray


class Task:
    """Model, data and training settings of a run.

    Attributes:
        settings: A mapping with these items:

            - "train", "measured": paths of the training and the evaluation part.
            - "cardinalities": number of keys of each field. "numbers": number of numeric features.
            - "dim": dimension of the rows. "bottom", "top": widths of the MLPs, including the
              output layer.
            - "batch": batch size. "steps": number of steps. "every": steps between evaluations.
            - "rate": learning rate of Adam for the MLPs.
            - "rows_rate", "damping": learning rate and initial accumulator value of Adagrad for
              the rows.
            - "seed", "threads".
        fields: Number of categorical fields.
        numbers: Number of numeric features.
        columns: Number of 4-byte values per example.
        steps: Number of steps.
        batch_size: Examples per batch.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.fields, self.numbers = len(settings["cardinalities"]), settings["numbers"]
        self.columns = self.fields + self.numbers + 1
        self.steps, self.batch_size = settings["steps"], settings["batch"]

    def batches(self) -> Iterator[Batch]:
        """Yields the batches of the training part in order."""
        with open(self.settings["train"], "rb") as file:
            for _ in range(self.steps):
                values = np.fromfile(file, np.int32, self.batch_size * self.columns)
                yield self._split(values)

    def measured(self) -> Batch:
        """Reads all examples of the evaluation part."""
        return self._split(np.fromfile(self.settings["measured"], np.int32))

    def _split(self, values: np.ndarray) -> Batch:
        rows = values.reshape(-1, self.columns)
        numbers = np.ascontiguousarray(rows[:, self.fields :]).view(np.float32)
        keys = np.ascontiguousarray(rows[:, : self.fields])
        return Batch(keys, np.ascontiguousarray(numbers[:, :-1]), numbers[:, -1].copy())


class Recorder:
    """Records training time, trained examples and quality during a run.

    Training time includes reading the data and excludes imports and evaluations. The first call of
    `step` includes tracing and compilation. Its duration is therefore replaced by an estimate: its
    steps count as long as the steps of the second call.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._measured = task, task.measured()
        self._steps = 0
        self._begin = self._start = time.perf_counter()
        self._begun_after = 0.0
        self._first: int | None = None
        self._points: list[dict[str, float]] = []

    def step(self, predict: Predict, steps: int = 1) -> None:
        """Counts completed steps and evaluates the model every `settings["every"]` steps.

        Args:
            predict: Function that returns logits.
            steps: Number of steps since the last call.
        """
        before, self._steps = self._steps, self._steps + steps
        now = time.perf_counter()
        if self._first is None:
            self._begun_after, self._begin, self._first = now - self._start, now, steps
            return
        if before == self._first:
            self._begin -= (now - self._begin) * self._first / steps
        every = self._task.settings["every"]
        if before // every < self._steps // every:
            self._measure(predict, now)

    def end(self, predict: Predict) -> None:
        """Evaluates the model after the last step unless that has been done."""
        if not self._points or self._points[-1]["steps"] < self._steps:
            self._measure(predict, time.perf_counter())

    def _measure(self, predict: Predict, now: float) -> None:
        of, seconds = self._measured, now - self._begin
        ends = range(0, len(of.labels), _MEASURED_AT_ONCE)
        parts = [slice(begin, begin + _MEASURED_AT_ONCE) for begin in ends]
        found = np.concatenate([predict(of.keys[part], of.dense[part]) for part in parts])
        quality = {"auc": auc(of.labels, found), "log_loss": log_loss(of.labels, found)}
        trained = self._steps * self._task.batch_size
        point = {"steps": self._steps, "examples_trained": trained, "seconds": seconds}
        self._points.append({**point, **quality})
        fields = f"{self._steps} steps, {seconds:.1f} s: AUC {quality['auc']:.5f}"
        print(f"{fields}, log loss {quality['log_loss']:.5f}", flush=True)
        self._begin += time.perf_counter() - now

    def finish(self, path: str, versions: Mapping[str, str], **fields: Any) -> None:
        """Writes the record as JSON.

        Args:
            path: Path of the record. It is replaced atomically.
            versions: Versions of the libraries.
            **fields: Further fields of the record.
        """
        record = {
            "settings": dict(self._task.settings), "evaluations": self._points,
            "seconds_to_first_step": self._begun_after, "versions": dict(versions), **fields,
        }  # fmt: skip
        unfinished = Path(f"{path}.part")
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        os.replace(unfinished, path)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the AUC. A tie counts half."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    first = np.searchsorted(ordered, ordered, "left")
    last = np.searchsorted(ordered, ordered, "right")
    ranks = (first + last + 1) / 2
    is_click = labels[order] > 0.5
    clicks = int(is_click.sum())
    rest = len(labels) - clicks
    return float((ranks[is_click].sum() - clicks * (clicks + 1) / 2) / (clicks * rest))


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Returns the mean binary cross entropy in nats."""
    logits = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))


def read_arguments(arguments: list[str]) -> tuple[Task, str]:
    """Parses the first two arguments.

    Returns:
        The task, read from the settings file (first argument), and the path of the record (second
        argument).
    """
    settings, record = arguments[1:3]
    return Task(json.loads(Path(settings).read_text(encoding="utf-8"))), record
