"""Traces some steps of a run, on all ranks.

In: the steps of `model.fit`. Out: a file that Perfetto (ui.perfetto.dev) shows.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from slipstream_tf.cli.callbacks import StepCount
from slipstream_tf.distributed import Communicator
from slipstream_tf.distributed.agreement import gather_json
from slipstream_tf.telemetry import trace

FIRST, STEPS = 128, 32


class TraceCallback(keras.callbacks.Callback):
    """Traces `STEPS` steps after the first `FIRST`, or as many as there are; put it last.

    What Python does stands in the trace where it is within a `tf.profiler.experimental.Trace`,
    operations of TensorFlow by themselves; what ranks exchange, as in Horovod's timeline.

    Args:
        count: of the steps.
        comm: the ranks; at the end of the trace they gather it.
        path: of the file, which rank 0 writes; one that ends in ".gz" is compressed.
    """

    def __init__(self, count: StepCount, comm: Communicator, path: str) -> None:
        super().__init__()
        self._count, self._comm, self._path = count, comm, path
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._end: int | None = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts or ends the trace, where it is time to."""
        if self._end is None and self._count.steps >= FIRST:
            self._start()
        elif self._folder is not None and self._count.steps >= (self._end or 0):
            self._stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the trace of a run that is shorter; warns if it was too short for any."""
        if self._folder is not None:
            self._stop()
        elif self._end is None:
            logging.warning(
                "--trace=%s: nothing is written, since the run has no more than %d steps.",
                self._path, FIRST,
            )  # fmt: skip

    @property
    def _timeline(self) -> str:
        assert self._folder is not None
        return os.path.join(self._folder.name, "timeline.json")

    def _start(self) -> None:
        self._end = self._count.steps + STEPS
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-trace-")
        self._comm.start_timeline(self._timeline)
        tf.profiler.experimental.start(self._folder.name)

    def _stop(self) -> None:
        assert self._folder is not None
        tf.profiler.experimental.stop()
        self._comm.stop_timeline()
        own = trace.profiled(self._folder.name, self._comm.rank) + trace.exchanged(self._timeline)
        self._folder.cleanup()
        self._folder = None
        of_ranks = gather_json(self._comm, own, "slipstream.trace")
        if self._comm.rank == 0:
            trace.write(self._path, [event for events in of_ranks for event in events])
