"""A rank of test_hosts.py: what `comm.traffic` counts beside what the kernel counted.

    bytes_sent.py COUNTERS ROWS: COUNTERS is the folder of the interface's counters.

Writes a line of JSON: {collective: {"counted": bytes, "kernel": bytes, "seconds": ...}}, and under
"idle" what nothing but Horovod's own talk took.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from slipstream_tf import distributed

# Until what a collective left in the queues is on the wire; also the time of "idle".
REST = 0.5
WIDTH = 64


def main() -> None:
    """Runs each collective once, after one that is not measured."""
    counters, rows = Path(sys.argv[1]), int(sys.argv[2])
    job = distributed.init()
    tensor = tf.ones([rows, WIDTH])
    part = rows // job.size
    splits = tf.constant([part] * (job.size - 1) + [rows - part * (job.size - 1)], tf.int32)
    collectives: dict[str, Callable[[], object]] = {
        "idle": lambda: None,
        "sum": lambda: job.sum(tensor, "dense", "sum"),
        "gather": lambda: job.gather(tensor[:part], "rows", "gather"),
        "gather_uneven": lambda: job.gather(tensor[: part * job.rank], "rows", "gather_uneven"),
        "exchange": lambda: job.exchange(tensor, splits, "keys", "exchange"),
        "broadcast_0": lambda: job.broadcast(tensor, 0, "control", "broadcast_0"),
        "broadcast_last": lambda: job.broadcast(tensor, job.size - 1, "control", "broadcast_last"),
    }
    found = {}
    for name, collective in collectives.items():
        job.sum(tf.zeros([1]), "control", f"before_{name}")
        time.sleep(REST)
        start, counted = time.monotonic(), job.traffic().total
        kernel = int((counters / "tx_bytes").read_text())
        collective()
        time.sleep(REST)
        found[name] = {
            "counted": job.traffic().total - counted,
            "kernel": int((counters / "tx_bytes").read_text()) - kernel,
            "seconds": round(time.monotonic() - start, 3),
        }
    job.sum(tf.zeros([1]), "control", "end")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
