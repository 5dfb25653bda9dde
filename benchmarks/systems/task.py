"""What a system trains, how it is measured, and its record: alike for all. Needs NumPy only.

The training part is one file of rows, in the order in which they are trained: per example int32
keys, float32 numbers and a float32 label. A batch is a block of it, so that a system reads a batch
by one read, with whatever it has for that.
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

# int32 keys [n, fields] and float32 numbers [n, numbers] -> logits, float32 [n].
Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]
_MEASURED_AT_ONCE = 8192


@dataclasses.dataclass(frozen=True)
class Batch:
    """Examples.

    Attributes:
        keys: int32 [n, fields], from 0 on in each field.
        dense: float32 [n, numbers].
        labels: float32 [n], 0 or 1.
    """

    keys: np.ndarray
    dense: np.ndarray
    labels: np.ndarray


class Task:
    """A model, its data and how it is trained.

    Attributes:
        settings: "train", "measured": files of rows; "cardinalities": keys of each field;
            "numbers"; "dim"; "bottom", "top": widths of the MLPs, the last one included; "batch",
            "steps", "every" (steps between measurements), "rate" (of Adam, for the MLPs),
            "rows_rate", "damping" (of Adagrad, for the rows: their first sum of squares), "seed",
            "threads".
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.fields, self.numbers = len(settings["cardinalities"]), settings["numbers"]
        self.columns = self.fields + self.numbers + 1
        self.steps, self.batch_size = settings["steps"], settings["batch"]

    def batches(self) -> Iterator[Batch]:
        """Reads the training part, batch by batch."""
        with open(self.settings["train"], "rb") as file:
            for _ in range(self.steps):
                values = np.fromfile(file, np.int32, self.batch_size * self.columns)
                yield self._split(values)

    def measured(self) -> Batch:
        """Reads the whole part that is measured."""
        return self._split(np.fromfile(self.settings["measured"], np.int32))

    def _split(self, values: np.ndarray) -> Batch:
        rows = values.reshape(-1, self.columns)
        numbers = np.ascontiguousarray(rows[:, self.fields :]).view(np.float32)
        keys = np.ascontiguousarray(rows[:, : self.fields])
        return Batch(keys, np.ascontiguousarray(numbers[:, :-1]), numbers[:, -1].copy())


class Recorder:
    """Clock, examples and quality along a run.

    Seconds are those of training, reading included, without imports and measurements. The first
    call of a step builds graphs and compiles: its steps count as long as those of the second one.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._measured = task, task.measured()
        self._steps = 0
        self._begin = self._start = time.perf_counter()
        self._begun_after = 0.0
        self._first: int | None = None
        self._points: list[dict[str, float]] = []

    def step(self, predict: Predict, steps: int = 1) -> None:
        """Counts steps that have been made; measures where it is time to.

        Args:
            predict: gives logits.
            steps: that were made since the last call.
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
        """Measures the end, where the last step has not."""
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
        told = f"{self._steps} steps, {seconds:.1f} s: AUC {quality['auc']:.5f}"
        print(f"{told}, log loss {quality['log_loss']:.5f}", flush=True)
        self._begin += time.perf_counter() - now

    def finish(self, path: str, versions: Mapping[str, str], **told: Any) -> None:
        """Writes the record."""
        record = {
            "settings": dict(self._task.settings), "evaluations": self._points,
            "seconds_to_first_step": self._begun_after, "versions": dict(versions), **told,
        }  # fmt: skip
        unfinished = Path(f"{path}.part")
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        os.replace(unfinished, path)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Share of pairs of a click and none that are ranked right; ties count half."""
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
    """Mean cross entropy in nats."""
    logits = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))


def read_arguments(arguments: list[str]) -> tuple[Task, str]:
    """Returns the task of a file of settings, and the path of the record: the two arguments."""
    settings, record = arguments[1:3]
    return Task(json.loads(Path(settings).read_text(encoding="utf-8"))), record
