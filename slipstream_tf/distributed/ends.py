"""Ranks whose inputs end at different times: they go on with empty batches until all have ended.

A batch of no inputs trains nothing and counts nowhere, but its rank still takes part in every
exchange. Skipping inputs makes uneven ends the rule.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from slipstream_tf.distributed.batches import element_of, loosen, map_in_step, no_inputs
from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.distributed.exchange import Names

_BATCH_SIZE = Names("scale_loss")


def even_ends(dataset: tf.data.Dataset, comm: Communicator) -> tf.data.Dataset:
    """Makes a rank's batches as many as those of the rank that has the most.

    Put it last, after `Slipstream.apply`; `with_next` and `.prefetch` may follow. Every rank must
    iterate over it at the same time, to the end, whether for training or evaluation: each batch
    waits until all ranks ask for theirs. An iteration that ends early (`steps_per_epoch`, a
    callback that stops) may leave ranks one question apart: the next one would then go wrong or
    wait.

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
    filler = tf.nest.map_structure(lambda part: no_inputs(part, "even_ends"), spec)
    if comm.size == 1:
        return dataset
    name = Names("even_ends").of("more")
    real = map_in_step(
        dataset, lambda *parts: (loosen(element_of(spec, parts)), tf.constant(1, tf.int64))
    )
    empty = tf.data.Dataset.from_tensors(0).repeat()
    empty = empty.map(lambda _: (loosen(filler), tf.constant(0, tf.int64)))

    def ask(element: Any, is_real: tf.Tensor) -> Any:
        return element, comm.sum(is_real, "control", name)

    together = real.concatenate(empty).map(ask).take_while(lambda _, count: count > 0)
    options = tf.data.Options()
    options.deterministic = True
    return map_in_step(together, lambda element, _: element).with_options(options)


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
