"""Shared parts of the SOK examples: flags, dense layers and AUC."""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

from sok_clicks import FIELDS


def parse_flags() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--data",
        default="generated:400000",
        help="generated examples, or path of a Criteo TSV file",
    )
    parser.add_argument("--batch_size", type=int, default=512, help="examples per batch and rank")
    parser.add_argument("--dim", type=int, default=16, help="values per row")
    parser.add_argument(
        "--capacity",
        type=int,
        default=1 << 20,
        help="maximum number of rows per table and rank, a power of two",
    )
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate of the rows")
    parser.add_argument(
        "--dense_rate", type=float, default=1e-3, help="learning rate of the dense layers"
    )
    return parser.parse_args()


class DenseLayers(tf.Module):
    """The dense layers of a DLRM, initialized equally on all ranks."""

    def __init__(self, dim: int):
        super().__init__()
        tf.keras.utils.set_random_seed(0)
        dense = tf.keras.layers.Dense
        self.bottom = tf.keras.Sequential([dense(64, "relu"), dense(dim, "relu")])
        self.top = tf.keras.Sequential([dense(64, "relu"), dense(1)])
        self.bottom.build([None, 13])
        self._pairs = np.flatnonzero(np.tri(FIELDS + 1, k=-1))
        self.top.build([None, dim + self._pairs.size])

    @property
    def weights(self) -> list[tf.Variable]:
        """Trainable variables of all layers."""
        return [*self.bottom.trainable_variables, *self.top.trainable_variables]

    def __call__(self, dense: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Returns logits [batch] for dense [batch, 13] and rows [batch, 26, dim]."""
        bottom = self.bottom(dense)
        vectors = tf.concat([bottom[:, None, :], rows], axis=1)
        products = tf.reshape(
            tf.matmul(vectors, vectors, transpose_b=True), [-1, (FIELDS + 1) ** 2]
        )
        crossed = tf.gather(products, self._pairs, axis=1)
        return self.top(tf.concat([bottom, crossed], axis=1))[:, 0]


def mean_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the mean cross-entropy of a batch."""
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def auc(labels: np.ndarray, logits: np.ndarray) -> float:
    """Returns the AUC.

    The AUC is the fraction of correctly ordered pairs of a click and a non-click. Ties count half.
    """
    _, place, counts = np.unique(logits, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    clicks = int(labels.sum())
    others = labels.size - clicks
    return float((ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * others))
