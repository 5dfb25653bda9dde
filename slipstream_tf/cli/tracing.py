"""Traces some steps of a run on all ranks.

In: TensorFlow's profile of each rank, and Horovod's timeline of rank 0. Out: one file of Chrome's
trace events for Perfetto (ui.perfetto.dev): a process for each rank with a track for each thread,
and a process for each tensor that ranks exchange.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from slipstream_tf._utils.agreement import gather_json
from slipstream_tf.cli.callbacks import StepCount
from slipstream_tf.distributed import Communicator

FIRST, STEPS = 128, 32
Events = list[dict[str, Any]]
# Of the timeline's processes, one for each tensor: behind those of the ranks.
_FIRST_OF_TENSORS = 1000
# Threads of the host; other planes are of devices and of the machine.
_HOST = "/host:"


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
        own = profiled(self._folder.name, self._comm.rank) + exchanged(self._timeline)
        self._folder.cleanup()
        self._folder = None
        of_ranks = gather_json(self._comm, own, "slipstream.trace")
        if self._comm.rank == 0:
            write(self._path, [event for events in of_ranks for event in events])


def write(path: str, events: Events) -> None:
    """Writes events as a trace that begins at 0.

    Args:
        path: of the file; one that ends in ".gz" is compressed.
        events: "ts" and "dur" in microseconds, "ts" since any moment.
    """
    first = min((event["ts"] for event in events if "ts" in event), default=0)
    moved = [{**e, "ts": round(e["ts"] - first, 3)} if "ts" in e else e for e in events]
    opened: Any = gzip.open if path.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": moved, "displayTimeUnit": "ms"}, file)


def profiled(folder: str, rank: int) -> Events:
    """Returns the events of TensorFlow's profile of a process.

    Args:
        folder: that the profiler was given.
        rank: of the process.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    events: Events = [_named("process_name", rank, 0, f"rank {rank}")]
    for path in glob.glob(os.path.join(folder, "plugins", "profile", "*", "*.xplane.pb")):
        space = xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        begun = _start_of(space)
        for plane in space.planes:
            if not plane.name.startswith(_HOST):
                continue
            names = {key: data.display_name or data.name
                     for key, data in plane.event_metadata.items()}  # fmt: skip
            for line in plane.lines:
                events.append(_named("thread_name", rank, line.id, line.display_name or line.name))
                for event in line.events:
                    at = (begun + line.timestamp_ns) * 1e-3 + event.offset_ps * 1e-6
                    events.append(
                        {"ph": "X", "name": names[event.metadata_id], "pid": rank, "tid": line.id,
                         "ts": at, "dur": round(event.duration_ps * 1e-6, 3)}
                    )  # fmt: skip
    return events


def _start_of(space: Any) -> int:
    """Nanoseconds since 1970 at which a profile began, where its lines count from there; else 0."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                begun = int(stat.uint64_value or stat.int64_value)
                lines = [ln.timestamp_ns for other in space.planes for ln in other.lines]
                # Lines of some versions count from 1970 themselves.
                return begun if not lines or max(lines) < begun // 2 else 0
    return 0


def exchanged(path: str) -> Events:
    """Returns the events of a timeline of Horovod's; none without a file, as on ranks but 0."""
    text = Path(path).read_text(encoding="utf-8").strip() if os.path.exists(path) else ""
    if not text:
        return []
    given = json.loads(text if text.endswith("]") else f"{text.rstrip(',')}]")
    begun = 0
    events: Events = []
    for event in given:
        start = event.get("args", {}).get("start_time_since_epoch_in_micros")
        if start is not None:
            begun = int(start)
            continue
        pid = _FIRST_OF_TENSORS + event.get("pid", 0)
        moved = {**event, "pid": pid, "tid": 0}
        if "ts" in event:
            moved["ts"] = begun + event["ts"]
        if event["ph"] == "M" and event["name"] == "process_name":
            moved["args"] = {"name": f"exchange of {event['args']['name']}"}
        events.append(moved)
    return events


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
