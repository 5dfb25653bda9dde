"""Trains a table with rows on disk until finished or killed.

    spilling_until_killed.py FOLDER STEPS SECONDS

The program continues from the newest checkpoint in FOLDER/saved and trains STEPS steps. If SECONDS
is above 0, the program kills itself with SIGKILL after that time. Otherwise it writes the final
table to FOLDER/table.npz.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import tensorflow as tf

from slipstream_tf import Storage, Table, initializers, optimizers
from slipstream_tf.distributed import CheckpointManager, SingleProcess
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore

DIM, KEYS, BATCH, EVERY = 16, 20_000, 400, 5
SPECS = [FeatureSpec("t", "t", padding_key=None)]


def make(storage: Storage) -> NativeStore:
    """Returns a store with an empty table."""
    table = Table("t", DIM, initializer=initializers.RandomUniform(seed=4), storage=storage)
    return NativeStore([table], optimizers.Adagrad(0.1))


def train(store: NativeStore, step: int) -> None:
    """Trains one step with data that depends only on its number."""
    random = np.random.default_rng(step)
    keys = tf.constant(random.integers(0, KEYS, BATCH))
    _, plan = store.lookup(pack({"t": keys}, SPECS), training=True)
    gradient = random.normal(size=(BATCH, DIM)).astype(np.float32)
    store.apply_gradients(plan, [tf.constant(gradient)])


def main() -> None:
    """Runs the program. See the module's docstring."""
    folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    spill = folder / "spill"
    spill.mkdir(exist_ok=True)
    store = make(Storage(memory="200KB", spill=str(spill)))
    saved = CheckpointManager(
        folder / "saved",
        tf.train.Checkpoint(x=tf.Variable(1.0)),
        SingleProcess(),
        store,
        max_to_keep=2,
    )
    if seconds:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    last = saved.restore()
    begin = 0 if last is None else last.step
    print("from", begin, flush=True)
    for step in range(begin, begin + steps):
        train(store, step)
        if (step + 1) % EVERY == 0:
            saved.save(step + 1)
    saved.wait()
    np.savez(folder / "table.npz", **store.export_table("t"))


if __name__ == "__main__":
    main()
