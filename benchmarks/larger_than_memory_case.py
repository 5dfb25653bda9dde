"""A case of larger_than_memory.py: fills, trains and measures a table.

    python larger_than_memory_case.py '{"keys": 1000000, ...}'

The last line of the output is JSON. Keys follow a power law: p(k) is proportional to the integral
of x^-zipf over [k, k + 1], which needs no array of all keys. Key k has rank k.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.ops import features
from slipstream_tf.tables import NativeStore

FEATURES, BATCH, ZIPF, AHEAD = 26, 2048, 1.05, 4
_FILL_AT_ONCE = 1 << 19


def draw(generator: np.random.Generator, keys: int) -> np.ndarray:
    """Draws the keys of a batch, int64 [batch, features]."""
    uniform = generator.random((BATCH, FEATURES))
    maximum = (keys + 1.0) ** (1 - ZIPF) - 1.0
    ranks = (1.0 + uniform * maximum) ** (1 / (1 - ZIPF)) - 1.0
    return np.minimum(ranks.astype(np.int64), keys - 1)


def batches(keys: int, seed: int) -> Iterator[tf.Tensor]:
    """Yields an endless sequence of batches, drawn in a background thread."""
    made: queue.Queue[tf.Tensor] = queue.Queue(AHEAD)

    def make() -> None:
        generator = np.random.default_rng(seed)
        while True:
            made.put(tf.constant(draw(generator, keys)))

    threading.Thread(target=make, daemon=True).start()
    while True:
        yield made.get()


def cached_bytes() -> int:
    """Returns the bytes of this process's unlinked files in the page cache."""
    libc, cached = ctypes.CDLL(None, use_errno=True), 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            is_nameless = "(deleted)" in os.readlink(path)
            size = os.stat(path).st_size
        except OSError:
            continue
        if not is_nameless or not size:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
            pages = -(-size // mmap.PAGESIZE)
            resident = (ctypes.c_ubyte * pages)()
            buffer = np.frombuffer(view, np.uint8)
            found = libc.mincore(
                ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(size), resident
            )
            del buffer
            if found == 0:
                cached += int((np.frombuffer(resident, np.uint8) & 1).sum()) * mmap.PAGESIZE
    return cached


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def run(case: Mapping[str, Any]) -> dict[str, Any]:
    """Fills the table and measures training steps.

    Args:
        case: keys, dim, memory (bytes; 0 means all rows), spill (folder), warmup, steps, seed,
            prefetches.
    """
    keys, dim = case["keys"], case["dim"]
    storage = slip.Storage()
    if case["memory"]:
        storage = slip.Storage(memory=case["memory"], spill=case["spill"])
    table = slip.Table("t", dim, storage=storage)
    store = NativeStore([table], slip.optimizers.Adagrad(0.01, 0.1))
    specs = [features.FeatureSpec(f"f{i}", "t") for i in range(FEATURES)]
    rows = np.random.default_rng(0).normal(size=(_FILL_AT_ONCE, dim)).astype(np.float32) * 0.01
    start = time.perf_counter()
    # Start with the coldest keys. The rows that are written last are in memory when training
    # begins.
    for end in range(keys, 0, -_FILL_AT_ONCE):
        part = np.arange(max(0, end - _FILL_AT_ONCE), end)
        store.write_rows("t", part, rows[: part.size])
    filled = time.perf_counter() - start
    gradient = tf.random.stateless_normal([BATCH, FEATURES, dim], [0, 0])

    @tf.function
    def train(batch: tf.Tensor, following: tf.Tensor) -> None:
        if case["prefetches"]:
            store.prefetch_rows(features.pack(following, specs))
        packed = features.pack(batch, specs)
        pooled, plan = store.lookup(packed, training=True, stacked=True)
        with tf.control_dependencies(pooled):
            store.apply_gradients(plan, [gradient])

    source = batches(keys, case["seed"])
    batch, following = next(source), next(source)
    times = []
    before = store.spill_statistics("t")
    for step in range(case["warmup"] + case["steps"]):
        if step == case["warmup"]:
            before = store.spill_statistics("t")
        start = time.perf_counter()
        train(batch, following)
        times.append(time.perf_counter() - start)
        batch, following = following, next(source)
    after = store.spill_statistics("t")
    ms = np.sort(np.array(times[case["warmup"] :])) * 1e3
    steps = case["steps"]
    return {
        "fill_seconds": filled,
        "median_ms": float(np.median(ms)),
        "mean_ms": float(ms.mean()),
        "p99_9_ms": float(ms[min(len(ms) - 1, int(0.999 * len(ms)))]),
        "largest_ms": float(ms[-1]),
        "misses": (after.rows_read - before.rows_read) / steps,
        "missed_share": (after.rows_read - before.rows_read) / steps / (BATCH * FEATURES),
        "read_ahead": (after.rows_read_ahead - before.rows_read_ahead)
        / max(1, after.rows_read - before.rows_read),
        "rows_written": (after.rows_written - before.rows_written) / steps,
        "rows_in_memory": after.rows_in_memory,
        "rows_on_disk": after.rows_on_disk,
        "disk_bytes": after.disk_bytes,
        "table_bytes": store.statistics("t").allocated_bytes,
        "resident_bytes": resident_bytes(),
        "cached_bytes": cached_bytes(),
    }


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(2)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    print(json.dumps(run(json.loads(sys.argv[1]))), flush=True)
