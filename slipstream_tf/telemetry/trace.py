"""Some steps of a training as one trace, which Perfetto (ui.perfetto.dev) and Chrome show.

In: what TensorFlow's profiler saw of this rank, Horovod's timeline of rank 0. Out: one file of
Chrome's trace events: a process for each rank, with a track for each thread; one for each tensor
that ranks exchanged.
"""

import glob
import gzip
import json
import os
from typing import Any

Events = list[dict[str, Any]]
# Of the timeline's processes, one for each tensor: behind those of the ranks.
_FIRST_OF_TENSORS = 1000
# Threads of the host; other planes are of devices and of the machine.
_HOST = "/host:"


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
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        text = file.read().strip()
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
