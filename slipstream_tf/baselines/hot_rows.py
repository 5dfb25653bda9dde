"""Hot rows on every rank, all others spread over them: the tables of the FAE and Hotline baselines.

In: keys, of which some are hot. Out: their rows. An example whose keys are all hot needs no row of
another rank.
Method: FAE (Adnan et al., arXiv 2103.00686) and Hotline (Adnan et al., arXiv 2204.05436).
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
    """Embeddings of which some keys are hot; a baseline, not to be saved.

    A key is hot or not from the beginning. Rows of hot keys are on every rank, and their gradients
    are gathered in every step, so that all ranks have the same. The others are sharded; of a batch
    that has none, messages are empty. It trains as a plain layer does, but for the order of sums.

    Args:
        tables: one for each column of the keys, all of one dim.
        optimizer: as of `EmbeddingCollection`.
        hot_keys: of each table, int64 [n] in any order, as `profile_hot_keys` gives them.
        comm: the ranks; None: this process alone.
        **kwargs: of `keras.layers.Layer`.

    Raises:
        ValueError: hot keys are given for more or fewer tables.
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
            allowed = f"{len(self.tables)}, one for each table"
            raise invalid("hot_keys", f"{len(hot_keys)} lists", "HotRows", allowed)
        self.hot_keys = [np.unique(np.asarray(keys, np.int64)) for keys in hot_keys]
        self.hot = EmbeddingCollection(tables, optimizer, comm=comm, dtype=self.dtype_policy)

    def call(  # type: ignore[override]
        self, inputs: Any, training: bool | None = None, **others: Any
    ) -> tf.Tensor:
        """Returns rows [batch, tables, dim] of a key matrix; see `EmbeddingCollection.call`.

        Raises:
            ValueError: there are weights or next inputs.
        """
        for name, value in others.items():
            if value is not None:
                raise invalid(name, value, f"layer {self.name!r}", "None: a baseline has none")
        is_hot = are_hot(inputs, self.hot_keys)
        return self.hot_rows(inputs, is_hot, training) + self.other_rows(inputs, is_hot, training)

    def hot_rows(self, keys: tf.Tensor, is_hot: tf.Tensor, training: bool | None) -> tf.Tensor:
        """Returns rows [batch, tables, dim] of hot keys (`are_hot`), zeros of others."""
        hot = tf.where(is_hot, keys, tf.constant(PADDING_KEY, keys.dtype))
        return self.hot(hot, training=training)

    def other_rows(self, keys: tf.Tensor, is_hot: tf.Tensor, training: bool | None) -> tf.Tensor:
        """Returns rows [batch, tables, dim] of keys that are not hot, zeros of those that are.

        A collective.
        """
        others = tf.where(is_hot, tf.constant(PADDING_KEY, keys.dtype), keys)
        return super().call(others, training=training)


# Any, because attributes come from the Keras class that it is mixed into.
_Mixin: Any = object


class Hotline(_Mixin):
    """A mixin in front of a click model over `HotRows`, which trains each batch in two parts.

    Examples whose keys are all hot are popular. They are computed while the rows of the others come
    from other ranks. The step is one: gradients of both parts are applied together, as if the batch
    had not been split.
    """

    def train_step(self, data: Any) -> Any:
        """Runs one training step."""
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
        """What a part's examples are of the batch's mean."""
        share = tf.size(part) / tf.maximum(tf.shape(y)[0], 1)
        # Of no examples there is no mean.
        padded = tf.concat([output, tf.zeros([1, 1])], axis=0)[: tf.maximum(tf.size(part), 1)]
        labels = tf.concat([tf.gather(y, part), tf.zeros([1, *y.shape[1:]], y.dtype)], axis=0)
        labels = labels[: tf.maximum(tf.size(part), 1)]
        given = None if weights is None else tf.gather(weights, part)
        loss = keras.Model.compute_loss(self, None, labels, padded, given)
        return loss * tf.cast(share, loss.dtype)
