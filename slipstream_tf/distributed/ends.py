"""Ranks whose inputs end at different times: they go on with empty batches until all have ended.

A batch of no inputs trains nothing and counts nowhere, but its rank still takes part in every
exchange. Skipping inputs makes uneven ends the rule.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.distributed.exchange import Names
from slipstream_tf.errors import invalid

_BATCH_SIZE = Names("scale_loss")


def even_ends(dataset: tf.data.Dataset, comm: Communicator) -> tf.data.Dataset:
    """Makes a rank's batches as many as those of the rank that has the most.

    Put it last, after `Slipstream.apply`; a `.prefetch` may follow. Every rank must iterate over
    it at the same time, to the end, whether for training or evaluation: each batch waits until all
    ranks ask for theirs. An iteration that ends early (`steps_per_epoch`, a callback that stops)
    may leave ranks one question apart: the next one would then go wrong or wait.

    Args:
        dataset: of this rank; its elements are batches: nested structures of dense tensors and
            RaggedTensors.
        comm: the ranks.

    Returns:
        The same batches, then batches of no inputs until the other ranks' have ended, too.

    Raises:
        ValueError: a component is neither dense nor ragged, or has no batch dimension.
    """
    spec = dataset.element_spec
    filler = tf.nest.map_structure(_no_inputs, spec)
    if comm.size == 1:
        return dataset
    name = Names("even_ends").of("more")
    real = dataset.map(lambda *parts: (_loosen(_element(spec, parts)), tf.constant(1, tf.int64)))
    empty = tf.data.Dataset.from_tensors(0).repeat()
    empty = empty.map(lambda _: (_loosen(filler), tf.constant(0, tf.int64)))

    def ask(element: Any, is_real: tf.Tensor) -> Any:
        return element, comm.sum(is_real, "control", name)

    together = real.concatenate(empty).map(ask).take_while(lambda _, count: count > 0)
    options = tf.data.Options()
    options.deterministic = True
    return together.map(lambda element, _: element).with_options(options)


def scale_loss(loss: tf.Tensor, batch_size: Any, comm: Communicator) -> tf.Tensor:
    """Scales the gradient of a rank's mean loss so that the ranks' average is that of all inputs.

    Ranks' batches may differ in size: a plain average of their gradients would give inputs of small
    batches more weight. A collective.

    Args:
        loss: float32 scalar, mean over the inputs of this rank's batch; of an empty one, anything.
        batch_size: inputs of this rank's batch, scalar integer.
        comm: the ranks.

    Returns:
        The loss (0 for an empty batch), with its gradient scaled by size * batch_size / inputs of
        all ranks.
    """
    if comm.size == 1:
        return loss
    own = tf.cast(batch_size, loss.dtype)
    total = comm.sum(tf.reshape(own, [1]), "control", _BATCH_SIZE.of("batch_size"))[0]
    scale = own * comm.size / tf.maximum(total, 1.0)
    loss = tf.where(own > 0, loss, tf.zeros_like(loss))
    scaled = loss * scale
    return scaled + tf.stop_gradient(loss - scaled)


def _element(spec: Any, parts: tuple[Any, ...]) -> Any:
    # `map` unpacks tuples and nothing else.
    return parts if isinstance(spec, tuple) else parts[0]


def _no_inputs(spec: Any) -> Any:
    allowed = "a dense tensor or a RaggedTensor with a batch dimension"
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 1:
        flat = tf.zeros([0, *_known(spec.shape[2:])], spec.dtype)
        return tf.RaggedTensor.from_row_splits(flat, tf.zeros([1], spec.row_splits_dtype))
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        raise invalid("dataset", spec, "even_ends", allowed)
    if spec.dtype == tf.string:
        return tf.fill([0, *_known(spec.shape[1:])], "")
    return tf.zeros([0, *_known(spec.shape[1:])], spec.dtype)


def _known(shape: tf.TensorShape) -> list[int]:
    return [0 if size is None else size for size in shape]


def _loosen(element: Any) -> Any:
    """Forgets the static sizes of batches and of ragged widths, which differ in an empty batch."""

    def loosen(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            return part.with_flat_values(loosen(part.flat_values)).with_row_splits_dtype(tf.int64)
        shape = [None, *part.shape[1:]]
        return tf.compat.v1.placeholder_with_default(part, shape)

    return tf.nest.map_structure(loosen, element)
