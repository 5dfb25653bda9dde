"""Trains a DLRM with SOK's HKV tables on multiple GPUs.

Run on N GPUs: horovodrun -np N python FILE

--help lists the flags. The example prints losses and the test AUC.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

from sok_clicks import FIELDS, batches
from sok_parts import DenseLayers, auc, mean_loss, parse_flags


def train(flags: argparse.Namespace) -> None:
    """Trains for one epoch and prints the test AUC."""
    import horovod.tensorflow as hvd
    import sparse_operation_kit as sok

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
    sok.init(use_legacy_optimizer=False)
    table = sok.DynamicVariable(
        dimension=flags.dim,
        initializer="0.01",
        var_type="hybrid",
        name="rows",
        init_capacity=flags.capacity,
        max_capacity=flags.capacity,
    )
    updater = sok.OptimizerWrapper(tf.compat.v1.train.AdagradOptimizer(flags.rate, 1e-6))
    model = DenseLayers(flags.dim)
    optimizer = tf.keras.optimizers.Adam(flags.dense_rate)
    optimizer.build(model.weights)

    def predict(dense: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        rows = sok.all2all_dense_embedding(table, tf.reshape(keys, [-1]))
        return model(dense, tf.reshape(rows, [-1, FIELDS, flags.dim]))

    @tf.function
    def train_step(dense: tf.Tensor, keys: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            # SOK sums the gradients over ranks. Divide by their number to get the mean.
            loss = mean_loss(labels, predict(dense, keys)) / hvd.size()
        gradients = tape.gradient(loss, [table, *model.weights])
        rows = [(gradients[0], table)]
        updater.apply_gradients(rows)
        sums = [hvd.allreduce(gradient, op=hvd.Sum) for gradient in gradients[1:]]
        optimizer.apply_gradients(zip(sums, model.weights, strict=True))
        return loss * hvd.size()

    fraction = (flags.batch_size, hvd.rank(), hvd.size())
    for step, batch in enumerate(batches(flags.data, "train", *fraction), start=1):
        loss = train_step(*map(tf.constant, batch))
        if step % 100 == 0 and hvd.rank() == 0:
            print(f"step {step}: loss {float(loss):.4f}")
    tested = [(y, predict(x, k)) for x, k, y in batches(flags.data, "test", *fraction)]
    labels, logits = (hvd.allgather(np.concatenate(part)) for part in zip(*tested, strict=True))
    if hvd.rank() == 0:
        print(f"test AUC {auc(labels.numpy(), logits.numpy()):.4f} of {labels.shape[0]} examples")


if __name__ == "__main__":
    train(parse_flags())
