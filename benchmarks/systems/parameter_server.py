"""Trains with parameter servers, as XDL does, using `tf.distribute.ParameterServerStrategy`.

This process is the coordinator. It starts parameter servers, which hold the rows and the dense
weights, and workers, which read batches, fetch the rows and send gradients. All processes run on
this machine. Tables are sharded variables with sparse gradients (`tf.IndexedSlices`), which the
legacy Keras optimizers apply on the servers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import tf_keras
import tf_parts
from task import Recorder, Task, read_arguments
from tf_parts import DenseLayers

_LEGACY = tf.keras.optimizers.legacy
# Number of steps that are scheduled before the coordinator waits.
_AT_ONCE = 8
# Minimum size of a shard.
_SHARD_BYTES = 1 << 20


def serve(role: str, index: int, cluster: dict[str, list[str]], threads: int) -> None:
    """Runs a parameter server or a worker until the process is killed.

    Args:
        role: `"ps"` or `"worker"`.
        index: Index of the process within its role.
        cluster: Addresses by role.
        threads: Number of threads for TensorFlow.
    """
    tf_parts.limit_threads(threads)
    tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=role, task_index=index, protocol="grpc"
    ).join()


def free_ports(count: int) -> list[int]:
    """Returns free ports of the loopback interface.

    Args:
        count: Number of ports.

    Raises:
        SystemExit: Not enough ports are free.
    """
    sockets = []
    try:
        for _ in range(count):
            sockets.append(socket.socket())
            sockets[-1].bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    except OSError as error:
        raise SystemExit(
            f"parameter_server: {count} ports on loopback are not available: {error}"
        ) from None
    finally:
        for one in sockets:
            one.close()


class Cluster:
    """Worker and server processes; a context manager that kills them at exit."""

    def __init__(self, workers: int, servers: int, threads: int) -> None:
        ports = free_ports(workers + servers)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.addresses = {"worker": addresses[:workers], "ps": addresses[workers:]}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open while self is.
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "serve", role, str(index), str(threads)],
                env={**os.environ, "CLUSTER": json.dumps(self.addresses)},
                stdout=self._log,
                stderr=self._log,
            )
            for role, found in self.addresses.items()
            for index in range(len(found))
        ]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def require(self) -> None:
        """Raises SystemExit if a process has ended.

        For example, its port may be in use.
        """
        for process in self._processes:
            if process.poll() is not None:
                self._log.seek(0)
                last = self._log.read().strip().splitlines()[-1:]
                raise SystemExit(f"parameter_server: a process ended: {' '.join(last)}")


def main() -> None:
    task, record = read_arguments(sys.argv)
    settings = task.settings
    tf_parts.limit_threads(settings["threads"])
    tf.keras.utils.set_random_seed(settings["seed"])
    workers, servers = settings.get("workers", 1), settings.get("servers", 1)
    with Cluster(workers, servers, settings["threads"]) as cluster:
        train(task, record, cluster)


def train(task: Task, record: str, cluster: Cluster) -> None:
    """Trains a task on the cluster and writes its record.

    Args:
        task: Model, data and settings.
        record: Path of the record.
        cluster: Running workers and servers.
    """
    settings = task.settings
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.addresses), rpc_layer="grpc"
    )
    cluster.require()
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        _SHARD_BYTES, max_shards=len(cluster.addresses["ps"])
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        tables = [
            tf.Variable(tf.random.uniform([rows, settings["dim"]], -0.05, 0.05), name=f"t{i}")
            for i, rows in enumerate(settings["cardinalities"])
        ]
        dense_layers = DenseLayers(tf.keras, settings, task.fields)
        of_rows = _LEGACY.Adagrad(settings["rows_rate"], settings["damping"])
        of_weights = _LEGACY.Adam(settings["rate"])
    rows = [shard for table in tables for shard in getattr(table, "variables", [table])]
    weights = dense_layers.variables

    def logits(keys: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        found = [tf.nn.embedding_lookup(table, keys[:, i]) for i, table in enumerate(tables)]
        return dense_layers.logits(dense, tf.stack(found, axis=1))

    @tf.function
    def step(batches: Any) -> None:
        def one(features: dict[str, tf.Tensor], labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                found = logits(features["keys"], features["dense"])
                losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, found)
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, [*rows, *weights])
            of_rows.apply_gradients(zip(gradients[: len(rows)], rows, strict=True))
            of_weights.apply_gradients(zip(gradients[len(rows) :], weights, strict=True))

        strategy.run(one, args=next(batches))

    @tf.function(reduce_retracing=True)
    def scores(keys: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        return logits(keys, dense)

    def predict(keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        return scores(tf.constant(keys, tf.int64), tf.constant(dense)).numpy()

    batches = iter(
        coordinator.create_per_worker_dataset(lambda: tf_parts.dataset(task).repeat().prefetch(2))
    )
    recorder, done = Recorder(task), 0
    every = settings["every"]
    while done < task.steps:
        # Run the first step separately because it traces the graphs.
        count = 1 if done == 0 else min(_AT_ONCE, every - done % every, task.steps - done)
        for _ in range(count):
            coordinator.schedule(step, args=(batches,))
        if count < _AT_ONCE or (done + count) % every == 0:
            coordinator.join()
        done += count
        recorder.step(predict, count)
    coordinator.join()
    recorder.end(predict)
    versions = {"tensorflow": tf.__version__, "tf_keras": tf_keras.__version__}
    recorder.finish(record, versions)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]), json.loads(os.environ["CLUSTER"]), int(sys.argv[4]))
    else:
        main()
