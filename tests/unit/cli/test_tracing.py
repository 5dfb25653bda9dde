"""Tests of `cli.tracing`: traces of TensorFlow and Horovod merged into one file."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import tensorflow as tf

from slipstream_tf.cli import tracing

# The format of Horovod: one process per tensor, times relative to the start of the file.
TIMELINE = """[
{"name": "process_name", "ph": "M", "pid": 0, "args":
 {"start_time_since_epoch_in_micros":1700000000000000}},
{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "rows"}},
{"ph": "B", "name": "NEGOTIATE_ALLGATHER", "ts": 20, "pid": 1},
{"ph": "E", "ts": 25, "pid": 1}"""


def test_operations_have_wall_clock_times(tmp_path: Path) -> None:
    square = tf.function(lambda x: tf.linalg.matmul(x, x), autograph=False)
    square(tf.ones([64, 64]))
    begun = time.time()
    tf.profiler.experimental.start(str(tmp_path))
    with tf.profiler.experimental.Trace("a part of the program"):
        square(tf.ones([64, 64])).numpy()
    tf.profiler.experimental.stop()
    events = tracing.profiled(str(tmp_path), rank=3)
    assert {event["pid"] for event in events} == {3}
    assert events[0] == {
        "ph": "M", "name": "process_name", "pid": 3, "tid": 0, "args": {"name": "rank 3"}
    }  # fmt: skip
    (part,) = (event for event in events if event["name"] == "a part of the program")
    (product,) = (event for event in events if "MatMul" in event["name"])
    assert begun * 1e6 - 1e6 < part["ts"] < time.time() * 1e6
    assert part["ts"] <= product["ts"] < product["ts"] + product["dur"]
    threads = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {part["tid"], product["tid"]} <= threads


def test_messages_have_wall_clock_times(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    assert tracing.exchanged(str(path)) == []
    for text in (TIMELINE + "]", TIMELINE + ",\n"):  # A complete file, and one that was cut off.
        path.write_text(text)
        events = tracing.exchanged(str(path))
        begin, end = (event for event in events if "ts" in event)
        assert (begin["ts"], end["ts"]) == (1700000000000020, 1700000000000025)
        named = [event for event in events if event.get("name") == "process_name"]
        assert [event["args"]["name"] for event in named] == ["exchange of rows"]
        assert named[0]["pid"] == begin["pid"] == end["pid"] >= 1000


def test_trace_begins_at_zero(tmp_path: Path) -> None:
    events = [{"ph": "M", "pid": 0}, {"ph": "X", "ts": 1.7e15}, {"ph": "X", "ts": 1.7e15 + 2.5}]
    for name, opened in (("a.json", open), ("a.json.gz", gzip.open)):
        tracing.write(str(tmp_path / name), events)
        with opened(tmp_path / name, "rt") as file:
            written = json.load(file)["traceEvents"]
        assert [event.get("ts") for event in written] == [None, 0.0, 2.5]
