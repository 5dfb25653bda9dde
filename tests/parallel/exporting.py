"""Exports SavedModels and deltas of tables on multiple ranks, for test_programs.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from slipstream_tf import Table, distributed, export, optimizers
from slipstream_tf.distributed import Communicator
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.ops.update_policy import UpdatePolicy

SPEC = tf.TensorSpec([None, 2], tf.int64)
KEYS = np.stack([np.arange(60), np.arange(60)[::-1]], axis=1)


def train(layer: EmbeddingCollection, comm: Communicator, low: int) -> None:
    """Trains one step on common keys and on keys of this rank."""
    keys = np.concatenate([np.arange(low, low + 10), low + 10 * comm.rank + np.arange(10)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(layer(np.stack([keys, keys], axis=1), training=True)))
    tape.gradient(loss, layer.trainable_variables)


def served(path: Path) -> np.ndarray:
    loaded = tf.saved_model.load(str(path))
    return loaded.serve(tf.constant(KEYS)).numpy()


def check(comm: Communicator, folder: Path, placement: str) -> None:
    tables = [Table("a", 4), Table("b", 4)]
    layer = EmbeddingCollection(tables, optimizers.SGD(0.1), comm=comm, placement=placement)
    for table in tables:
        policy = UpdatePolicy("defer", movement=1e-3, max_age=1000, max_rows=6400)
        layer.store.set_update_policy(table.name, policy)
    train(layer, comm, 0)
    export.saved_model(layer, folder / "1", signature=SPEC)
    expected = layer(KEYS).numpy()
    np.testing.assert_array_equal(served(folder / "1"), expected)
    token = export.token(layer)
    assert len(token.tables) == (2 if comm.rank == 0 else 0)
    train(layer, comm, 15)
    export.delta(layer, folder / "delta", since=folder / "1")
    export.delta(layer, folder / "token_delta", since=token)
    expected = layer(KEYS).numpy()
    assert (served(folder / "1") != expected).any()
    if comm.rank == 0:
        export.apply_delta(folder / "1", folder / "delta", folder / "2")
        export.apply_delta(folder / "1", folder / "token_delta", folder / "3")
    comm.sum(tf.constant(1), "control", f"applied.{placement}")
    for version in "23":
        np.testing.assert_array_equal(served(folder / version), expected)
    try:
        export.saved_model(layer, folder / "1", signature=SPEC)
    except ValueError as error:
        assert comm.rank == 0 and "a new or empty folder" in str(error), error
    except RuntimeError as error:
        assert comm.rank > 0 and "Rank 0 could not write" in str(error), error
    else:
        raise AssertionError("an existing export was overwritten")


def main() -> None:
    comm = distributed.init()
    for placement in ("replicated", "sharded"):
        check(comm, Path(sys.argv[1]) / placement, placement)
    print(f"rank {comm.rank} of {comm.size}: all exports are correct", flush=True)


if __name__ == "__main__":
    main()
