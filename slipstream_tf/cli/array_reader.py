"""A reader of inputs that are in memory, for the small sets that the programs make themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from slipstream_tf.inputs.bad_lines import BadLines
from slipstream_tf.inputs.spec import DataSpec


@dataclasses.dataclass
class ArrayReader:
    """Batches of arrays; see `slipstream_tf.inputs.spec.Reader`.

    Attributes:
        spec: what the batches hold.
        keys: int64 [n, fields].
        dense: float32 [n, num_dense], or None.
        labels: float32 [n].
        batch_size: inputs per batch.
        shuffle_seed: of the order, another one in each pass; None: as given.
        bad_lines: none, ever.
    """

    spec: DataSpec
    keys: np.ndarray
    dense: np.ndarray | None
    labels: np.ndarray
    batch_size: int
    shuffle_seed: int | None = None
    bad_lines: BadLines = dataclasses.field(default_factory=BadLines)

    def dataset(self) -> tf.data.Dataset:
        """Returns the batches."""
        with tf.device("CPU:0"):
            columns = {"keys": tf.constant(self.keys, tf.int64)}
            if self.dense is not None:
                columns["dense"] = tf.constant(self.dense, tf.float32)
            labels = tf.constant(self.labels, tf.float32)
        count = len(self.labels)
        positions = tf.data.Dataset.range(count)
        if self.shuffle_seed is not None:
            positions = positions.shuffle(count, seed=self.shuffle_seed)

        def gather(batch: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            features = {name: tf.gather(column, batch) for name, column in columns.items()}
            return features, tf.gather(labels, batch)

        return positions.batch(self.batch_size).map(gather).prefetch(2)
