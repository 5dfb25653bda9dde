"""A small job whose ranks are threads of this process.

The number of ranks, the placement and the folder are parameters. Keys are drawn with the step as
the seed, so that two runs of the same steps are equal. Checkpoints are saved and restored for real.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from engine_settings import engine_settings

from slipstream_tf import Retention, Storage, Table, initializers, optimizers
from slipstream_tf.distributed import (
    CheckpointManager,
    ReplicatedStore,
    ShardedStore,
    SingleProcess,
)
from slipstream_tf.engine.tracker import SaturationTracker
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore

TABLES = (
    Table("a", 4, initializer=initializers.RandomUniform(seed=1)),
    Table("b", 3, initializer=initializers.RandomUniform(seed=2)),
)
SPECS = [FeatureSpec("a", "a", "sum"), FeatureSpec("b", "b", "sum")]
GLOBAL_BATCH, KEYS = 12, 40
SETTINGS: dict[str, Any] = {
    **{"defer_movement": 0.15, "defer_max_age": 6, "drift_metric": "l2"},
    **{"window_steps": 4, "warmup": 0},
}


class Threads:
    """The ranks of a job as threads of one process.

    Collectives meet at a barrier. All ranks must call them in the same order.
    """

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.given = size, threading.Barrier(size), [None] * size

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        """Calls work(communicator) on every rank; returns the results by rank."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = work(OneThread(self, rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return results


class OneThread(SingleProcess):
    """The communicator of one rank."""

    def __init__(self, job: Threads, rank: int) -> None:
        self._job, self.rank, self.size = job, rank, job.size

    def _all(self, value: Any) -> list[Any]:
        self._job.given[self.rank] = value
        self._job.barrier.wait()
        found = list(self._job.given)
        self._job.barrier.wait()
        return found

    def gather(self, tensor: Any, kind: Any, name: str) -> tf.Tensor:
        return tf.concat(self._all(tf.convert_to_tensor(tensor)), 0)

    def sum(self, tensor: Any, kind: Any, name: str) -> tf.Tensor:
        return tf.add_n(self._all(tf.convert_to_tensor(tensor)))

    def exchange(self, tensor: Any, splits: Any, kind: Any, name: str) -> Any:
        pieces = tf.split(tf.convert_to_tensor(tensor), np.asarray(splits))
        mine = [sent[self.rank] for sent in self._all(pieces)]
        return tf.concat(mine, 0), tf.constant([len(piece) for piece in mine], tf.int32)


class Engine:
    """Exposes a tracker through the checkpoint interface of `Slipstream`."""

    def __init__(self, tracker: SaturationTracker) -> None:
        self.tracker = tracker

    def state(self) -> Any:
        return {"tracker": self.tracker.state()}

    def check(self, states: Any) -> None:
        self.tracker.check([state["tracker"] for state in states])

    def restore(self, states: Any) -> None:
        self.tracker.restore([state["tracker"] for state in states])


class Job:
    """The store, the tracker and the checkpoints of one rank."""

    def __init__(
        self,
        comm: Any,
        placement: str,
        directory: Path,
        capacity: int | None = None,
        cache_bytes: int = 1 << 20,
        policies: tuple[str, ...] = ("defer_gradients", "skip_examples"),
        checkpoint: tf.train.Checkpoint | None = None,
        own: tf.train.Checkpoint | None = None,
        storage: Storage | None = None,
        retention: Retention | None = None,
        **settings: Any,
    ) -> None:
        rule = optimizers.Adagrad(0.1, 0.0, 1e-8)
        if capacity is not None:
            retention = Retention(capacity)
        storage = Storage() if storage is None else storage
        tables = [dataclasses.replace(t, retention=retention, storage=storage) for t in TABLES]
        self.comm = comm
        if comm.size == 1:
            self.store: Any = NativeStore(tables, rule)
        elif placement == "sharded":
            self.store = ShardedStore(tables, rule, comm, cache_bytes=cache_bytes)
        else:
            self.store = ReplicatedStore(tables, rule, comm)
        chosen = {name: v for name, v in {**SETTINGS, **settings}.items() if v is not None}
        engine = engine_settings(*policies, **chosen)
        self.tracker = SaturationTracker(self.store, engine, SPECS, comm)
        self.checkpoints = CheckpointManager(
            directory,
            tf.train.Checkpoint() if checkpoint is None else checkpoint,
            comm,
            self.store,
            engine=Engine(self.tracker),
            rank_checkpoint=own,
        )

    def train(self, begin: int, end: int, batch: int = GLOBAL_BATCH) -> None:
        """Trains the steps from `begin` to `end`.

        Each rank trains its part of the global batch.
        """
        for step in range(begin, end):
            random = np.random.default_rng(step)
            keys = (random.zipf(1.3, (batch, 2)) % KEYS).astype(np.int64)
            mine = keys[self.comm.rank :: self.comm.size]
            inputs = {"a": tf.constant(mine[:, 0]), "b": tf.constant(mine[:, 1])}
            self.tracker.classifier.classify(inputs, SPECS)
            pooled, plan = self.store.lookup(pack(inputs, SPECS), training=True)
            scale = 1.0 / len(mine)
            self.store.apply_gradients(plan, [scale * (rows - 0.1 * step) for rows in pooled])
            self.tracker.step()

    def evaluate(self) -> None:
        """Looks up all keys without training."""
        for first in range(0, KEYS, 8):
            keys = tf.range(first, first + 8, dtype=tf.int64)
            self.store.lookup(pack({"a": keys, "b": keys}, SPECS), training=False)

    def found(self) -> dict[str, Any]:
        """Returns the state of this rank: rows, deferred gradients, key states, threshold."""
        found: dict[str, Any] = {"threshold": self.tracker._threshold}
        for table in TABLES:
            found[table.name] = self.store.export_table(table.name, flush=False)
            found[f"{table.name} held"] = self.store.export_deferred(table.name)
            found[f"{table.name} states"] = self.tracker.states[table.name]
        found["reports"] = len(self.tracker.reports)
        return found
