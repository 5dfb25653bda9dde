"""A run of `slipstream-train --elastic` across changes of its ranks: its data and its counts.

In: what the ranks of the newest checkpoint noted. Out: the blocks that are left, and counts that go
on on rank 0, so that the sums over ranks are those of the whole run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from slipstream_tf.cli.callbacks import SUMMED, merged_points
from slipstream_tf.cli.pipeline import TrainingInputs
from slipstream_tf.cli.totals import total
from slipstream_tf.distributed import SavedJob
from slipstream_tf.distributed.elastic import (
    LEFT,
    TAKEN,
    ElasticJob,
    left_after,
    newest,
    require_restored,
)
from slipstream_tf.engine.report import added_up


class ElasticRun:
    """What a start goes on from, and what it saves beside; a collective.

    Args:
        job: the ranks that come and go.
        directory: of the checkpoints.

    Attributes:
        job: the same.
        left: blocks of the training part that are to be trained.
        lost: examples that ranks had taken, but neither trained nor skipped, when ranks changed.
        changes: of the ranks so far; of each the "step" of the checkpoint that was gone on from,
            the "ranks" then and "before", and the "seconds" since it had been saved.
    """

    def __init__(self, job: ElasticJob, directory: Path) -> None:
        self.job = job
        self._path, self._positions = newest(directory, job.comm)
        self.left = left_after(self._positions)
        self.lost = self._begun = 0
        self.changes: list[dict[str, Any]] = []

    def begin(self, last: SavedJob | None) -> None:
        """Says where training goes on, before the first step.

        Raises:
            RuntimeError: another checkpoint was restored than the one that the data go by.
        """
        require_restored(last, self._path)
        if last is None:
            return
        self._begun = last.step
        before, size = self._positions[0], self.job.comm.size
        seconds = max(0.0, time.time() - before["saved_at"])
        change = {"step": last.step, "ranks": size, "before": last.world_size, "seconds": seconds}
        self.changes = [*before["changes"], change]
        if self.job.comm.rank == 0:
            print(
                f"slipstream-train --elastic: {size} rank(s), {last.world_size} before. Goes on "
                f"from step {last.step:,}, which was saved {seconds:.0f} s ago.",
                flush=True,
            )

    def notes(self, inputs: TrainingInputs, model: Any, step: int) -> dict[str, Any]:
        """Returns what a checkpoint after a step has of this rank; no batch is being made."""
        trained = int(model.get_metrics_result()["trained"])
        return {
            LEFT: [self.left.first, self.left.taken],
            TAKEN: inputs.taken(step - self._begun),
            # Where nothing is left out, what was read ahead of the step comes again.
            "seen": int(inputs.seen.numpy()) if inputs.counts_as_read else trained,
            "trained": trained,
            "metrics": [v.numpy().tolist() for v in model.metrics_variables],
            "changes": self.changes,
            "saved_at": time.time(),
        }

    @property
    def noted(self) -> dict[str, Any]:
        """What this rank goes on from: on rank 0 the sums of all ranks, on the others none."""
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
        """Goes on counting from the sums of all ranks; a collective, after the engine's restore."""
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
