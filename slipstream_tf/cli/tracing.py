"""Traces a few steps of a run on all ranks.

The trace merges TensorFlow's profile of each rank with Horovod's timeline of rank 0 into one file
of Chrome trace events. Open it with Perfetto (ui.perfetto.dev). The trace has a process per rank,
with a track per thread, and a process per tensor that ranks exchange.
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
# First process id of the tensors in the timeline. Smaller ids are ranks.
_FIRST_OF_TENSORS = 1000
# Prefix of profiler planes with host threads. Other planes contain devices and metadata.
_HOST = "/host:"


class TraceCallback(keras.callbacks.Callback):
    """Traces `STEPS` steps after the first `FIRST` steps.

    A shorter run is traced to its end. The trace contains TensorFlow operations, Python blocks in a
    `tf.profiler.experimental.Trace`, and the messages in Horovod's timeline.

    Note: put it last in the list of callbacks.

    Args:
        count: Counter of the trained steps.
        comm: The communicator. The end of the trace is a collective.
        path: Path of the file that rank 0 writes. A path with the suffix ".gz" is compressed.
    """

    def __init__(self, count: StepCount, comm: Communicator, path: str) -> None:
        super().__init__()
        self._count, self._comm, self._path = count, comm, path
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._end: int | None = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts and stops the trace at the configured steps."""
        if self._end is None and self._count.steps >= FIRST:
            self._start()
        elif self._folder is not None and self._count.steps >= (self._end or 0):
            self._stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops a running trace; warns if the run was too short."""
        if self._folder is not None:
            self._stop()
        elif self._end is None:
            logging.warning(
                "--trace=%s: no trace is written, because the run ended before step %d. Train more "
                "steps, for example with more --epochs.",
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
    """Writes a trace file with timestamps relative to the first event.

    Args:
        path: Path of the file. A path with the suffix ".gz" is compressed.
        events: Chrome trace events. "ts" and "dur" are in microseconds, "ts" relative to any common
            origin.
    """
    first = min((event["ts"] for event in events if "ts" in event), default=0)
    moved = [{**e, "ts": round(e["ts"] - first, 3)} if "ts" in e else e for e in events]
    opened: Any = gzip.open if path.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": moved, "displayTimeUnit": "ms"}, file)


def profiled(folder: str, rank: int) -> Events:
    """Returns the events of TensorFlow's profile of this process.

    Args:
        folder: Log folder of the profiler.
        rank: Rank of the process, used as the process id in the trace.
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
    """Returns the offset in nanoseconds that makes timestamps relative to 1970.

    This is the start time of the profile if its timestamps are relative to the start, otherwise 0.
    """
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                begun = int(stat.uint64_value or stat.int64_value)
                lines = [ln.timestamp_ns for other in space.planes for ln in other.lines]
                # In some TensorFlow versions the timestamps are already relative to 1970.
                return begun if not lines or max(lines) < begun // 2 else 0
    return 0


def exchanged(path: str) -> Events:
    """Returns the events of Horovod's timeline.

    Args:
        path: Path of the timeline. Only rank 0 has this file; other ranks return no events.
    """
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
