"""Trains with `run_elastic` and records the batches of each step.

Arguments: a folder, the step after which all ranks exit without a message (0 for none), and the
placement of the tables.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

BATCHES, BATCH, EVERY = 40, 32, 4


class Notes(keras.callbacks.Callback):
    """Records the batch of each step and exits after a given step."""

    def __init__(self, path: Path, begun: int, last: int, seen: list[int]) -> None:
        super().__init__()
        self._path, self._step, self._last, self._seen = path, begun, last, seen

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([self._step, self._seen[batch]]) + "\n")
        if self._step == self._last:
            time.sleep(2.0)  # The checkpoint is written in the background meanwhile.
            os._exit(7)


def main() -> None:
    folder, last, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    random = np.random.default_rng(0)
    keys = random.integers(0, 1000, (BATCHES * BATCH, 2))
    # The second column is the number of the batch.
    keys[:, 1] = np.repeat(np.arange(BATCHES), BATCH)
    labels = (keys[:, 0] % 3 == 0).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((keys, labels)).batch(BATCH)

    def train(state: slip.distributed.ElasticState) -> Any:
        comm = state.comm
        tables = [slip.Table("a", 4), slip.Table("b", 4)]
        embeddings = slip.keras.EmbeddingCollection(tables, comm=comm, placement=way)
        model = keras.Sequential(
            [embeddings, keras.layers.Flatten(), keras.layers.Dense(1, activation="sigmoid")]
        )
        optimizer = slip.distributed.DistributedOptimizer(keras.optimizers.SGD(0.1), comm)
        model.compile(optimizer, "binary_crossentropy")
        model(keys[:1])
        optimizer.build(model.trainable_variables)
        own = state.remaining(batches)
        seen = [int(k[0, 1]) for k, _ in own.as_numpy_iterator()]
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
        restored = state.restore(saved, embeddings.store)
        begun = 0 if restored is None else restored.step
        notes = Notes(folder / f"size-{comm.size}-rank-{comm.rank}", begun, last, seen)
        ranks = slip.keras.RanksCallback(comm, embeddings.store)
        data = slip.distributed.pad_to_equal_steps(own, comm)
        model.fit(data, verbose=0, callbacks=[ranks, slip.keras.ElasticCallback(state), notes])
        print(f"rank {comm.rank} of {comm.size}: from {begun}", flush=True)

    slip.distributed.run_elastic(train, folder / "commits", EVERY)


if __name__ == "__main__":
    main()
