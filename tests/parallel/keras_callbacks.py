"""Checks Keras callbacks in `fit` on ranks, for test_programs.py.

Argument: "logs", "evaluates_alone", "checkpoint", or the placement of tables with different rows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_equals_one import DIM, FIELDS, Batch, batches_of, dataset_of, union

import slipstream_tf as slip
from slipstream_tf.distributed import DistributedOptimizer, pad_to_equal_steps

EPOCHS = 6


class Largest(keras.metrics.Metric):
    """The largest prediction, a metric that is not a sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def reset_state(self) -> None:
        self.largest.assign(-1.0)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        maximum = tf.reduce_max(tf.concat([tf.reshape(y_pred, [-1]), [-1.0]], 0))
        self.largest.assign(tf.maximum(self.largest, maximum))

    def result(self) -> Any:
        return self.largest


class Recorder(keras.callbacks.Callback):
    """Records the logs that a callback after ours receives."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def build(comm: Any, placement: str = "replicated") -> tuple[Any, Any]:
    keras.utils.set_random_seed(3)
    tables = [
        slip.Table(f"f{i}", dim=DIM, initializer=slip.initializers.RandomUniform(seed=i))
        for i in range(FIELDS)
    ]
    embeddings = slip.keras.EmbeddingCollection(
        tables, slip.optimizers.Adagrad(0.3, 0.1, 1e-8), comm=comm, placement=placement
    )
    model = slip.models.DCNv2(embeddings, 2, 1, deep=[8])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), comm)
    metrics = [keras.metrics.AUC(name="auc"), Largest()]
    model.compile(optimizer, "binary_crossentropy", metrics=metrics)
    return model, embeddings


def same_on_all(comm: Any, values: Any) -> np.ndarray:
    """Asserts that the values are equal on all ranks and returns them."""
    own = np.asarray(values, np.float64)
    of_all = comm.gather(tf.constant(own[None]), "control", "test.same").numpy()
    np.testing.assert_array_equal(of_all, np.broadcast_to(own, of_all.shape))
    return own


def require_same_logs(comm: Any, evaluates_alone: bool) -> None:
    """Asserts that all ranks have equal logs, learning rates and last epochs.

    The expected values are computed from the examples of all ranks.
    """
    model, embeddings = build(comm)
    recorder = Recorder()
    rank_data = [batches_of(rank) for rank in range(comm.size)]
    validation: list[list[Batch]] = [batches_of(10 + rank)[: 2 - rank] for rank in range(comm.size)]
    if evaluates_alone:
        validation[1] = []
    data = pad_to_equal_steps(dataset_of(rank_data[comm.rank]), comm)
    fitted = model.fit(
        data,
        epochs=EPOCHS,
        verbose=0,
        validation_data=None
        if evaluates_alone and comm.rank
        else dataset_of(validation[comm.rank]),
        callbacks=[
            slip.keras.RanksCallback(comm, embeddings.store),
            recorder,
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.02),
            keras.callbacks.EarlyStopping("val_auc", mode="max", patience=2),
        ],
    )
    names = ["loss", "auc", "val_loss", "val_auc"]
    same_on_all(comm, len(recorder.logs))
    same_on_all(comm, [[logs[name] for name in names] for logs in recorder.logs])
    same_on_all(comm, float(model.optimizer.learning_rate))
    assert fitted.history["val_loss"] == [logs["val_loss"] for logs in recorder.logs]
    assert "largest" in recorder.logs[0], "metrics that are not sums must stay local"

    # The last epoch's validation covers the examples of all ranks.
    joined = dataset_of([batch for batches in validation for batch in batches])
    wanted = model.evaluate(joined, verbose=0, return_dict=True)
    for name in ("loss", "auc"):
        np.testing.assert_allclose(recorder.logs[-1][f"val_{name}"], wanted[name], rtol=1e-5)
    # Compare the first epoch with a process that trains all examples.
    one, _ = build(slip.distributed.SingleProcess())
    trained = one.fit(dataset_of(union(rank_data)), verbose=0).history
    for name in ("loss", "auc"):
        np.testing.assert_allclose(recorder.logs[0][name], trained[name][0], rtol=1e-3)


def require_checkpoints(comm: Any) -> None:
    """Asserts that rank 0 can save each epoch while gradients are deferred."""
    model, embeddings = build(comm)
    policy = slip.DeferGradients(slip.Movement(0.3, max_age=1000))
    slipstream = slip.Slipstream(embeddings, policy, window=slip.Window(4, warmup=0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "epoch{epoch}.weights.h5"
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        data = pad_to_equal_steps(dataset_of(batches_of(comm.rank)), comm)
        callbacks = [slipstream.callback(), *([save] if comm.rank == 0 else [])]
        model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
        counts = [embeddings.store.update_counts(table.name) for table in embeddings.tables]
        assert sum(count.flushed for count in counts) > 0 and not any(
            c.deferred_now for c in counts
        )
        if comm.rank == 0:
            assert len(list(Path(folder).iterdir())) == 3
            rows = embeddings.store.export_table("f0")["rows"]
            model.load_weights(Path(folder) / "epoch3.weights.h5")
            np.testing.assert_array_equal(embeddings.store.export_table("f0")["rows"], rows)


def require_equal_rows(comm: Any, placement: str) -> None:
    """Asserts that replicas with different rows raise an error.

    Keys that only one rank has looked up are not a difference.
    """
    model, embeddings = build(comm, placement)
    data = pad_to_equal_steps(dataset_of(batches_of(comm.rank)), comm)
    callback = slip.keras.RanksCallback(comm, embeddings.store)
    model.fit(data, verbose=0, callbacks=[callback])
    if placement == "replicated":
        features = dataset_of(
            [
                (
                    {
                        "keys": np.full((1, FIELDS), 999 + comm.rank),
                        "dense": np.zeros((1, 2), np.float32),
                    },
                    np.zeros(1),
                )
            ]
        )
        for inputs, _ in features:
            model(inputs, training=True)
    model.fit(data, verbose=0, callbacks=[callback])
    contents = embeddings.store.export_table("f1")
    if comm.rank == 1:
        contents["rows"][3] += 0.5
        embeddings.store.import_table("f1", contents)
    try:
        model.fit(data, verbose=0, callbacks=[callback])
    except ValueError as error:
        assert placement == "replicated"
        key = contents["keys"][3] if comm.rank == 1 else ""
        assert "rows of table 'f1' on rank 1: the rows of 1 keys differ" in str(error), error
        assert f"for example of key {key}" in str(error), error
    else:
        assert placement == "sharded"


def main() -> None:
    """Runs one of the checks."""
    what = sys.argv[1]
    comm = slip.distributed.init()
    if what in ("logs", "evaluates_alone"):
        require_same_logs(comm, what == "evaluates_alone")
    elif what == "checkpoint":
        require_checkpoints(comm)
    else:
        require_equal_rows(comm, what)
    print(f"rank {comm.rank} of {comm.size}: all values are correct", flush=True)


if __name__ == "__main__":
    main()
