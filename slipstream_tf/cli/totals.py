"""Totals of counts, bytes and metrics over the ranks of a run.

Functions that return a total are collectives.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.agreement import gather_json
from slipstream_tf.cli.callbacks import SUMMED, merged_points, shown_loss
from slipstream_tf.cli.flag_set import RunError, raised_as
from slipstream_tf.cli.pipeline import TrainingInputs
from slipstream_tf.distributed import Communicator, SavedJob, elastic
from slipstream_tf.distributed.elastic import ElasticJob
from slipstream_tf.engine.ranks import Ranks
from slipstream_tf.engine.report import added_up
from slipstream_tf.telemetry.metrics import ClickMetrics, click_metrics


def evaluate(
    predict: Callable[[Any], tf.Tensor],
    dataset: tf.data.Dataset,
    comm: Communicator,
    part: str = "test",
) -> ClickMetrics:
    """Evaluates predictions over the examples of all ranks. A collective.

    Args:
        predict: Function that returns logits, float [batch] or [batch, 1], for the features of a
            batch.
        dataset: This rank's batches of (features, label). May be empty.
        comm: The communicator of the job.
        part: Name of the part of the data for error messages.

    Returns:
        The exact metrics, the same on all ranks.

    Raises:
        RunError: If no rank has examples, or a logit is not finite.
    """
    labels, logits = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for features, label in dataset:
        logits.append(predict(features).numpy().ravel())
        labels.append(label.numpy().ravel().astype(np.float32))
    all_labels, all_logits = (
        comm.gather(tf.constant(np.concatenate(own)), "control", f"slipstream.evaluation.{name}")
        for name, own in (("labels", labels), ("logits", logits))
    )
    if not all_labels.shape[0]:
        raise RunError(
            f"The {part} part has no examples, so the model cannot be evaluated. Files of fewer "
            "than 1,000 lines need slipstream-prepare, which puts every tenth line into that part."
        )
    problem = (
        f"The model cannot be evaluated on the {part} part. If training diverged, lower "
        "--rows_learning_rate or --learning_rate. "
    )
    with raised_as(RunError, problem, ValueError):
        return click_metrics(all_labels.numpy(), all_logits.numpy())


def total(comm: Communicator, count: int, name: str) -> int:
    """Returns the sum of `count` over all ranks. A collective.

    Args:
        comm: The communicator of the job.
        count: Number of this rank.
        name: Name of the collective.
    """
    return int(comm.sum(tf.constant([count], tf.int64), "control", f"slipstream.total.{name}")[0])


def total_metrics(model: Any, comm: Communicator) -> dict[str, Any]:
    """Returns the training metrics over all steps of all ranks. A collective.

    The states of the metrics (sums, confusion counts, example counts) are additive, so the function
    sums the state variables over ranks. Note: the metrics of `model` change.

    Args:
        model: A trained model from `build.build_model`.
        comm: The communicator of the job.

    Returns:
        A dictionary with "loss", "auc" and "trained", the number of trained examples.
    """
    if comm.size > 1:
        for index, variable in enumerate(model.metrics_variables):
            name = f"slipstream.metrics.{index}"
            variable.assign(comm.sum(variable.value, "control", name))
    results = model.get_metrics_result()
    quality = {"loss": shown_loss(results), "auc": float(results["auc"])}
    return {**quality, "trained": int(results["trained"])}


class Exchanged:
    """Counts gradient rows and bytes between ranks.

    The counts cover the whole run, including the parts before a resume.

    Args:
        stores: The stores of the embedding rows. Each store contains all tables.
        comm: The communicator of the job.
    """

    def __init__(self, stores: Sequence[Any], comm: Communicator) -> None:
        self._stores, self._comm = tuple(stores), comm
        self._tables = [table.name for table in self._stores[0].tables]
        # Counts of this rank before the last resume.
        self._bytes: dict[str, int] = {}
        self._rows: dict[str, dict[str, int]] = {}

    def state(self) -> dict[str, Any]:
        """Returns this rank's bytes by kind and gradient rows by table, JSON-serializable."""
        return {
            "bytes": self._own_bytes(),
            "gradient_rows": {name: self._own_rows(name) for name in self._tables},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the result of `state`, after rows are restored."""
        # Subtract the current counts, because restoring the rows also changes them.
        self._rows = {
            name: {kind: rows[kind] - now for kind, now in self._own_rows(name).items()}
            for name, rows in state["gradient_rows"].items()
        }
        self._bytes = dict(state["bytes"])

    def gradient_rows(self) -> dict[str, dict[str, int]]:
        """Returns the gradient row counts per table. A collective."""
        counts = [
            dataclasses.replace(self._stores[0].update_counts(name), **self._own_rows(name))
            for name in self._tables
        ]
        totals = Ranks(self._comm).total_counts(counts, "gradient_rows")
        return {
            name: dataclasses.asdict(sums) for name, sums in zip(self._tables, totals, strict=True)
        }

    def traffic(self) -> dict[str, Any]:
        """Returns the record's entry "ranks". A collective.

        Returns:
            A dictionary with "size", the number of ranks; "bytes", the bytes sent by all ranks, by
            kind; and "bytes_by_rank", a list with the bytes by kind of each rank.
        """
        by_rank = gather_json(self._comm, self._own_bytes(), "slipstream.traffic")
        return {"size": self._comm.size, "bytes": added_up(by_rank), "bytes_by_rank": by_rank}

    def _own_bytes(self) -> dict[str, int]:
        return added_up([self._bytes, self._comm.traffic().bytes])

    def _own_rows(self, table: str) -> dict[str, int]:
        before = self._rows.get(table, {})
        counts = added_up(dataclasses.asdict(s.update_counts(table)) for s in self._stores)
        # Counts of currently deferred gradients are states, not flows, so they are not summed over
        # the parts of a resumed run.
        flows = {kind: n for kind, n in counts.items() if not kind.startswith("deferred_")}
        return {kind: n + before.get(kind, 0) for kind, n in flows.items()}


class ElasticRun:
    """Continues the counts of `slipstream-train --elastic` when ranks change.

    Each change of the ranks restarts training from the newest checkpoint. Rank 0 takes over the
    counts of all former ranks, so that sums over ranks cover the whole run. Creating an object is a
    collective.

    Args:
        job: The elastic job.
        directory: Folder of the checkpoints.

    Attributes:
        job: The elastic job.
        left: Blocks of the training part that are not trained yet.
        lost: Number of examples that former ranks received but neither trained nor skipped.
        changes: A dictionary per change of the ranks: "step" of the restored checkpoint, number of
            "ranks" after and "before" the change, and "seconds" since the checkpoint was saved.
    """

    def __init__(self, job: ElasticJob, directory: Path) -> None:
        self.job = job
        self._path, self._positions = elastic.newest(directory, job.comm)
        self.left = elastic.left_after(self._positions)
        self.lost = self._begun = 0
        self.changes: list[dict[str, Any]] = []

    def begin(self, last: SavedJob | None) -> None:
        """Records a change of the ranks; called before the first step.

        Rank 0 prints the step from which training continues.

        Args:
            last: The restored checkpoint, or None at the start of the run.

        Raises:
            RuntimeError: If the restored checkpoint is not the one from which `left` was computed.
        """
        elastic.require_restored(last, self._path)
        if last is None:
            return
        self._begun = last.step
        before, size = self._positions[0], self.job.comm.size
        seconds = max(0.0, time.time() - before["saved_at"])
        change = {"step": last.step, "ranks": size, "before": last.world_size, "seconds": seconds}
        self.changes = [*before["changes"], change]
        if self.job.comm.rank == 0:
            print(
                f"slipstream-train --elastic: {size} rank(s) now, {last.world_size} before. "
                f"Training continues from step {last.step:,}, saved {seconds:.0f} s ago.",
                flush=True,
            )

    def notes(self, inputs: TrainingInputs, model: Any, step: int) -> dict[str, Any]:
        """Returns the state of this rank for a checkpoint, JSON-serializable.

        Args:
            inputs: The input pipeline. It must not be preparing a batch, see `wait_until_idle`.
            model: The trained model.
            step: Number of trained steps of the run.
        """
        trained = int(model.get_metrics_result()["trained"])
        return {
            elastic.LEFT: [self.left.first, self.left.taken],
            elastic.TAKEN: inputs.taken(step - self._begun),
            # If no examples are dropped, the run continues after the last trained block, and
            # examples that were read ahead are read again. Therefore they do not count as seen.
            "seen": int(inputs.seen.numpy()) if inputs.counts_as_read else trained,
            "trained": trained,
            "metrics": [v.numpy().tolist() for v in model.metrics_variables],
            "changes": self.changes,
            "saved_at": time.time(),
        }

    @property
    def noted(self) -> dict[str, Any]:
        """The state with which this rank continues.

        Counts of rank 0 are the sums over the former ranks, counts of other ranks are 0. Everything
        else is the state of former rank 0.
        """
        notes, comm = self._positions, self.job.comm
        curves = [position["curve"] for position in notes]
        points = merged_points([curve["places"] for curve in curves])
        measured = merged_points([[p for p, _ in curve["evaluated"]] for curve in curves])
        tables = notes[0]["gradient_rows"]
        rows = {name: added_up([n["gradient_rows"][name] for n in notes]) for name in tables}
        nbytes = added_up([position["bytes"] for position in notes])
        if comm.rank:
            for point in (*points, *measured):
                point.update(dict.fromkeys(SUMMED, 0))
            rows = {name: dict.fromkeys(counts, 0) for name, counts in rows.items()}
            nbytes = {}
        quality = [found for _, found in curves[0]["evaluated"]]
        evaluated = list(zip(measured, quality, strict=True))
        curve = {**curves[0], "places": points, "evaluated": evaluated}
        return {**notes[0], "curve": curve, "gradient_rows": rows, "bytes": nbytes}

    def restore(self, inputs: TrainingInputs, model: Any, engine: Any) -> None:
        """Restores counters and metrics after the engine. A collective.

        Args:
            inputs: The input pipeline.
            model: The built model, whose metrics are restored on rank 0.
            engine: The restored engine, or None.
        """
        comm, noted = self.job.comm, self._positions
        seen, trained = (sum(position[name] for position in noted) for name in ("seen", "trained"))
        skipped = 0
        if engine is not None:
            own = engine.tracker.classifier.counts().examples_skipped
            skipped = total(comm, own, "elastic.skipped")
            skipped += sum(report.examples_skipped for report in engine.tracker.reports)
        self.lost = seen - trained - skipped
        inputs.begin_at(seen, comm.rank == 0)
        if comm.rank:
            return
        for index, variable in enumerate(model.metrics_variables):
            values = (np.asarray(position["metrics"][index]) for position in noted)
            variable.assign(np.sum(list(values), axis=0).astype(variable.dtype))
