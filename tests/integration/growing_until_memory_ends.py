"""Grows a table in a process with limited memory. Run by test_out_of_memory.py.

Prints a line of JSON: the error, the number of rows before and after, whether the rows are
unchanged, and whether training continues.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from slipstream_tf import Table, optimizers
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables.native import NativeStore

DIM, BATCH, KNOWN = 256, 1 << 14, 1 << 16
SPECS = [FeatureSpec("f", "user")]
# Memory left to the process, in bytes. It is many times the need of a step or of `rows_of`, and
# less than the table requests when it grows. Therefore the table's allocation is the one that
# fails.
ROOM = 64 << 20


def step(store: NativeStore, first: int) -> None:
    """Looks up BATCH keys as one bag and trains their rows."""
    packed = pack({"f": tf.range(first, first + BATCH, dtype=tf.int64)[tf.newaxis]}, SPECS)
    pooled, plan = store.lookup(packed, training=True)
    assert plan is not None
    store.apply_gradients(plan, [tf.ones_like(pooled[0])])


def rows_of(store: NativeStore, count: int) -> Iterator[np.ndarray]:
    """Yields the rows of the first `count` keys in chunks."""
    for keys in np.array_split(np.arange(count), count >> 10):
        yield store.gather("user", keys)[0].numpy()


def main() -> None:
    """Grows the table to the memory limit, then checks and trains it."""
    store = NativeStore([Table("user", DIM)], optimizers.Adagrad(0.1))
    for first in range(0, KNOWN, BATCH):
        step(store, first)
    before = list(rows_of(store, KNOWN))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used, unlimited = pages * resource.getpagesize(), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, unlimited[1]))
    message, kind = "", ""
    try:
        for first in range(KNOWN, 64 * KNOWN, BATCH):
            step(store, first)
    except tf.errors.OpError as error:
        message, kind = str(error), type(error).__name__
    failed = {"kind": kind, "message": message, "rows": store.size("user")}
    is_intact = all(map(np.array_equal, before, rows_of(store, KNOWN)))
    step(store, 0)  # Known keys, because the table cannot grow.
    trained = rows_of(store, BATCH)
    continues = all((now != then).all() for now, then in zip(trained, before, strict=False))
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    step(store, 1 << 40)
    grows = store.size("user") >= failed["rows"] + 1
    print(json.dumps({**failed, "is_intact": is_intact, "continues": continues, "grows": grows}))


if __name__ == "__main__":
    main()
