"""Trains the model of sok_dlrm.py with native tables, without SOK."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels

import slipstream_tf as slip
from sok_clicks import FIELDS, batches
from sok_parts import DenseLayers, auc, mean_loss

# Used with and without SOK. The distance is set explicitly, because its default depends on the
# learning rate of the rows, which `SokStore` cannot read from SOK's optimizer.
POLICY = slip.DeferGradients(slip.Movement(0.005))
WINDOW = slip.Window(steps=50, warmup=100)

Train = Callable[[argparse.Namespace], None]


def unless_sok_loads(train: Train) -> Train:
    """Returns `train` if SOK works on this machine, otherwise `train_without_sok`."""
    problem = _why_sok_fails()
    if problem is None:
        return train
    if slip.distributed.init().rank == 0:
        print(f"SOK is not available ({problem}). Training uses native tables.")
    return train_without_sok


def _why_sok_fails() -> str | None:
    try:
        import horovod.tensorflow  # noqa: F401
        import sparse_operation_kit  # noqa: F401
    except Exception as error:  # SOK raises a plain Exception if its libraries are missing.
        return str(error).splitlines()[0]
    # SOK can be imported without a GPU if the CUDA libraries are installed, but its ops fail.
    able = {
        kernel.device_type for kernel in kernels.get_registered_kernels_for_op("DistSelect").kernel
    }
    if not any(tf.config.list_physical_devices(device) for device in able):
        return "no GPU"
    return None


def train_without_sok(flags: argparse.Namespace) -> None:
    """Trains and tests like `train` of sok_dlrm.py, with native tables."""
    comm = slip.distributed.init()
    embeddings = slip.keras.EmbeddingCollection(
        [
            slip.Table(
                "rows",
                flags.dim,
                initializer=slip.initializers.Constant(0.01),
                retention=slip.Retention(flags.capacity, eviction="lru"),
            )
        ],
        slip.optimizers.Adagrad(flags.rate, initial_accumulator_value=1e-6, epsilon=1e-30),
        {f"field_{i}": "rows" for i in range(FIELDS)},
        comm=comm,
        placement="sharded" if comm.size > 1 else "replicated",
    )
    slipstream = slip.Slipstream(embeddings, POLICY, WINDOW)
    model = DenseLayers(flags.dim)
    optimizer = slip.distributed.DistributedOptimizer(
        tf.keras.optimizers.Adam(flags.dense_rate), comm
    )
    # `embeddings.trainable_variables` contains the update anchor. Its gradient updates the rows.
    variables = [*embeddings.trainable_variables, *model.weights]
    optimizer.build(variables)

    def predict(dense: tf.Tensor, keys: tf.Tensor, training: bool = False) -> tf.Tensor:
        return model(dense, embeddings(keys, training=training))

    @tf.function
    def train_step(dense: tf.Tensor, keys: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        slipstream.observe(keys)
        with tf.GradientTape() as tape:
            loss = mean_loss(labels, predict(dense, keys, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    fraction = (flags.batch_size, comm.rank, comm.size)
    for step, batch in enumerate(batches(flags.data, "train", *fraction), start=1):
        loss = train_step(*map(tf.constant, batch))
        slipstream.step()
        if step % 100 == 0 and comm.rank == 0:
            print(f"step {step}: loss {float(loss):.4f}")
    embeddings.store.flush()
    tested = [(y, predict(x, k)) for x, k, y in batches(flags.data, "test", *fraction)]
    parts = (tf.constant(np.concatenate(part)) for part in zip(*tested, strict=True))
    labels, logits = (comm.gather(part, "control", f"example.{i}") for i, part in enumerate(parts))
    if comm.rank == 0:
        print(slipstream.report().table())
        print(f"test AUC {auc(labels.numpy(), logits.numpy()):.4f} of {labels.shape[0]} examples")
