"""Embedding tables of the FAE and Hotline baselines.

Rows of hot keys are replicated on every rank and all other rows are sharded. An example whose keys
are all hot therefore needs no row of another rank. Methods: FAE (Adnan et al., arXiv 2103.00686)
and Hotline (Adnan et al., arXiv 2204.05436).
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.baselines.segregation import are_hot
from slipstream_tf.config import Table
from slipstream_tf.distributed import Communicator
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.ops.features import PADDING_KEY
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.sampling.notes import without_wrapping


class HotRows(EmbeddingCollection):
    """Embedding collection that replicates the rows of hot keys on every rank.

    The set of hot keys is fixed. Gradients of their rows are gathered in every step, so that all
    replicas stay equal. The rows of all other (cold) keys are sharded. A batch without cold keys
    sends empty messages for sharded rows. Training computes the same updates as a plain
    `EmbeddingCollection`, except for the order of floating-point sums. This layer is a baseline and
    does not support saving.

    Args:
        tables: One table for each column of the key matrix, all with the same dim.
        optimizer: Optimizer of the rows, as in `EmbeddingCollection`.
        hot_keys: For each table, its hot keys, int64 [n] in any order, for example from
            `segregation.profile_hot_keys`.
        comm: The communicator of the ranks, or None for a single process.
        **kwargs: Arguments of `keras.layers.Layer`.

    Raises:
        ValueError: The number of lists in `hot_keys` differs from the number of tables.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: SparseOptimizer | None,
        hot_keys: Sequence[Any],
        comm: Communicator | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tables, optimizer, comm=comm, placement="sharded", **kwargs)
        if len(hot_keys) != len(self.tables):
            allowed = f"one list of keys per table, {len(self.tables)} in total"
            raise invalid("hot_keys", f"{len(hot_keys)} lists", "HotRows", allowed)
        self.hot_keys = [np.unique(np.asarray(keys, np.int64)) for keys in hot_keys]
        self.hot = EmbeddingCollection(tables, optimizer, comm=comm, dtype=self.dtype_policy)

    def call(  # type: ignore[override]
        self, inputs: Any, training: bool | None = None, **others: Any
    ) -> tf.Tensor:
        """Returns the rows [batch, tables, dim] of a key matrix.

        Args:
            inputs: Integers [batch, tables], with -1 for padding.
            training: Whether to create rows for new keys, count accesses and update rows.
            **others: Further arguments of `EmbeddingCollection.call`, which must be None.

        Raises:
            ValueError: Weights or next inputs are passed.
        """
        for name, value in others.items():
            if value is not None:
                allowed = f"None. HotRows does not support `{name}`"
                raise invalid(name, value, f"layer {self.name!r}", allowed)
        is_hot = are_hot(inputs, self.hot_keys)
        return self.hot_rows(inputs, is_hot, training) + self.other_rows(inputs, is_hot, training)

    def hot_rows(self, keys: tf.Tensor, is_hot: tf.Tensor, training: bool | None) -> tf.Tensor:
        """Returns rows [batch, tables, dim] of hot keys, zeros for cold keys.

        Args:
            keys: Integers [batch, tables].
            is_hot: bool [batch, tables], from `are_hot`.
            training: Whether the call is part of a training step.
        """
        hot = tf.where(is_hot, keys, tf.constant(PADDING_KEY, keys.dtype))
        return self.hot(hot, training=training)

    def other_rows(self, keys: tf.Tensor, is_hot: tf.Tensor, training: bool | None) -> tf.Tensor:
        """Returns rows [batch, tables, dim] of cold keys, zeros for hot keys.

        This is a collective: all ranks must call it.

        Args:
            keys: Integers [batch, tables].
            is_hot: bool [batch, tables], from `are_hot`.
            training: Whether the call is part of a training step.
        """
        others = tf.where(is_hot, tf.constant(PADDING_KEY, keys.dtype), keys)
        return super().call(others, training=training)


# `Any`, because the Keras model that the mixin is combined with provides the attributes.
_Mixin: Any = object


class Hotline(_Mixin):
    """Mixin for click models that computes each batch in two parts.

    Put it before the model in the list of base classes, for example `class M(Hotline, DLRM)`. The
    embeddings of the model must be `HotRows`. An example is popular if all its keys are hot.
    Popular examples are computed while the rows of the other examples are received from other
    ranks. The gradients of both parts are applied in one step, so that the result is the same as
    without the split.
    """

    def train_step(self, data: Any) -> Any:
        """Trains on one batch, computed in two parts.

        The first part has the popular examples and the second part the others; see the class.

        Args:
            data: `(features, label)` or `(features, label, sample_weight)`, where
                `features["keys"]` is integers [batch, tables], with -1 for padding.

        Returns:
            The metrics by name.
        """
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        dense, keys = self._split(without_wrapping(x))
        is_hot = are_hot(keys, self.embeddings.hot_keys)
        is_popular = tf.reduce_all(is_hot, axis=1)
        parts = [tf.where(is_popular)[:, 0], tf.where(~is_popular)[:, 0]]
        with tf.GradientTape() as tape:
            hot = self.embeddings.hot_rows(keys, is_hot, training=True)
            not_popular = tf.gather(keys, parts[1]), tf.gather(is_hot, parts[1])
            others = self.embeddings.other_rows(*not_popular, training=True)
            rows = [tf.gather(hot, parts[0]), tf.gather(hot, parts[1]) + others]
            outputs = [
                self._output(None if dense is None else tf.gather(dense, part), vectors)
                for part, vectors in zip(parts, rows, strict=True)
            ]
            loss = tf.add_n(
                [self._part_of_loss(y, weights, *each) for each in zip(parts, outputs, strict=True)]
            )
            if self._comm is not None:
                loss = self._scaled(loss, {"x": x, "y": y})
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        output = tf.dynamic_stitch([tf.cast(part, tf.int32) for part in parts], outputs)
        return self.compute_metrics(x, y, output, weights)

    def _output(self, dense: Any, vectors: tf.Tensor) -> tf.Tensor:
        vectors = tf.cast(vectors, self.compute_dtype)
        return self.prediction(self.logits(dense, vectors, True))

    def _part_of_loss(self, y: Any, weights: Any, part: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        """Returns the contribution of some examples to a batch's mean loss.

        Args:
            y: Labels of the batch.
            weights: Sample weights of the batch, or None.
            part: Positions of the part's examples in the batch.
            output: Predictions of the part.
        """
        fraction = tf.size(part) / tf.maximum(tf.shape(y)[0], 1)
        # The mean over an empty part is undefined, therefore a zero example is appended to it.
        padded = tf.concat([output, tf.zeros([1, 1])], axis=0)[: tf.maximum(tf.size(part), 1)]
        labels = tf.concat([tf.gather(y, part), tf.zeros([1, *y.shape[1:]], y.dtype)], axis=0)
        labels = labels[: tf.maximum(tf.size(part), 1)]
        given = None if weights is None else tf.gather(weights, part)
        loss = keras.Model.compute_loss(self, None, labels, padded, given)
        return loss * tf.cast(fraction, loss.dtype)
