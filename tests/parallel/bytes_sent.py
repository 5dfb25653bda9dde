"""Compares `comm.traffic` with the kernel's byte counters on one rank of test_hosts.py.

    bytes_sent.py COUNTERS ROWS

COUNTERS is the folder of the network interface's counters. Writes a line of JSON: {collective:
{"counted": bytes, "kernel": bytes, "seconds": ...}}. The entry "idle" contains the traffic of
Horovod's background communication.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from slipstream_tf import distributed

# Seconds to wait until queued bytes are on the wire. Also the duration of "idle".
REST = 0.5
WIDTH = 64


def main() -> None:
    """Runs each collective once, after an unmeasured warm-up collective."""
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
