"""Run by test_out_of_memory.py: a table grows in a process whose memory is bounded.

Prints a line of JSON: the error, rows before and after, whether rows are as they were, and whether
training goes on.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import tensorflow as tf

from slipstream_tf import TableConfig, optimizers
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.stores.native import NativeStore

DIM, BATCH = 256, 1 << 14
SPECS = [FeatureSpec("f", "user")]


def step(store: NativeStore, first: int) -> None:
    """Looks BATCH keys up, and trains their rows."""
    packed = pack({"f": tf.range(first, first + BATCH, dtype=tf.int64)}, SPECS)
    pooled, plan = store.lookup(packed, SPECS, training=True)
    assert plan is not None
    store.apply_gradients(plan, [tf.ones_like(pooled[0])])


def main() -> None:
    """Grows the table to the limit, looks at what is there, and trains on."""
    store = NativeStore([TableConfig("user", DIM)], optimizers.Adagrad(0.1))
    for first in range(0, 4 * BATCH, BATCH):
        step(store, first)
    known = np.arange(4 * BATCH)
    before = store.gather("user", known)[0].numpy()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used, unlimited = pages * resource.getpagesize(), resource.getrlimit(resource.RLIMIT_AS)
    # Room for tensors of some batches, and for some more slabs of rows.
    resource.setrlimit(resource.RLIMIT_AS, (used + (640 << 20), unlimited[1]))
    message, kind = "", ""
    try:
        for first in range(4 * BATCH, 4096 * BATCH, BATCH):
            step(store, first)
    except tf.errors.OpError as error:
        message, kind = str(error), type(error).__name__
    failed = {"kind": kind, "message": message, "rows": store.size("user")}
    is_intact = bool((store.gather("user", known)[0].numpy() == before).all())
    step(store, 0)  # of known keys, while there is no more memory
    trained = store.gather("user", known[:BATCH])[0].numpy()
    goes_on = bool((trained != before[:BATCH]).all())
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    step(store, 1 << 40)
    grows = store.size("user") >= failed["rows"] + 1
    print(json.dumps({**failed, "is_intact": is_intact, "goes_on": goes_on, "grows": grows}))


if __name__ == "__main__":
    main()
