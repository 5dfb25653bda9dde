"""Data sets whose batches end at different times on the ranks, or carry the keys of the next one.

A batch of no inputs trains nothing and counts nowhere, but its rank still takes part in every
exchange. Skipping inputs makes uneven ends the rule.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.comm import Communicator, Names
from slipstream_tf._utils.errors import invalid
from slipstream_tf.ops.features import num_rows

KEYS = "keys"
NEXT_KEYS = "next_keys"
"""Name of the feature that holds what "keys" of the next batch does."""
_BATCH_SIZE = Names("scale_loss")


def element_of(spec: Any, parts: tuple[Any, ...]) -> Any:
    """Returns the element that `map` called a function with.

    Args:
        spec: `element_spec` of the data set.
        parts: the function's arguments: `map` unpacks tuples and nothing else.
    """
    return parts if isinstance(spec, tuple) else parts[0]


def map_in_step(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """`dataset.map(function)` whose elements are made when they are pulled, and no sooner.

    tf.data makes those of a map without side effects some elements ahead, by itself, and with them
    what is upstream: inputs would be classified before a window ends, and ranks would ask each
    other for batches that nobody has pulled.
    """

    def apply(*parts: Any) -> Any:
        # The time is of no use, but reading it counts as a side effect.
        with tf.control_dependencies([tf.timestamp()]):
            return tf.nest.map_structure(tf.identity, function(*parts), expand_composites=True)

    return dataset.map(apply)


def no_inputs(element_spec: Any, place: str) -> Any:
    """Returns a batch of no inputs.

    Args:
        element_spec: of a data set's batches, or of a part of them.
        place: who asks, for errors.

    Raises:
        ValueError: a component is neither dense nor ragged nor sparse, or has no batch dimension.
    """

    def component(spec: Any) -> Any:
        if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 1:
            flat = tf.zeros([0, *_known(spec.shape[2:])], spec.dtype)
            return tf.RaggedTensor.from_row_splits(flat, tf.zeros([1], spec.row_splits_dtype))
        if isinstance(spec, tf.SparseTensorSpec) and spec.shape.rank:
            indices = tf.zeros([0, spec.shape.rank], tf.int64)
            shape = tf.constant([0, *_known(spec.shape[1:])], tf.int64)
            return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), shape)
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            allowed = "a dense tensor, a RaggedTensor or a SparseTensor with a batch dimension"
            raise invalid("dataset", spec, place, allowed)
        return tf.zeros([0, *_known(spec.shape[1:])], spec.dtype)

    return tf.nest.map_structure(component, element_spec)


def loosen(element: Any) -> Any:
    """Forgets the static sizes of batches and of ragged widths, which differ in an empty batch."""

    def loosen_part(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            flat = loosen_part(part.flat_values)
            return part.with_flat_values(flat).with_row_splits_dtype(tf.int64)
        if isinstance(part, tf.SparseTensor):
            shape = tf.compat.v1.placeholder_with_default(part.dense_shape, part.dense_shape.shape)
            return tf.SparseTensor(loosen_part(part.indices), loosen_part(part.values), shape)
        shape = [None, *part.shape[1:]]
        return tf.compat.v1.placeholder_with_default(part, shape)

    return tf.nest.map_structure(loosen_part, element)


def _known(shape: tf.TensorShape) -> list[int]:
    return [0 if size is None else size for size in shape]


def even_ends(
    dataset: tf.data.Dataset,
    comm: Communicator,
    note: Callable[[Any, tf.Tensor], Any] | None = None,
) -> tf.data.Dataset:
    """Makes a rank's batches as many as those of the rank that has the most.

    Put it last, after `Slipstream.apply`; `with_next` and `.prefetch` may follow. Every rank must
    iterate over it at the same time, to the end, whether for training or evaluation: each batch
    waits until all ranks ask for theirs. An iteration that ends early (`steps_per_epoch`, a
    callback that stops) may leave ranks one question apart: the next one would then go wrong or
    wait.

    Args:
        dataset: of this rank; its elements are batches: nested structures of dense, ragged and
            sparse tensors.
        comm: the ranks.
        note: called like a function for `dataset.map` with each batch and its inputs over the mean
            of the ranks' batches, float32, returns the batch to hand out:
            `sampling.notes.note_share`, so that a `keras.LossFeedback` need not ask the ranks in
            each step.

    Returns:
        The same batches, then batches of no inputs until the other ranks' have ended, too.

    Raises:
        ValueError: a component is no such tensor, or has no batch dimension.
    """
    spec = dataset.element_spec
    filler = no_inputs(spec, "even_ends")
    if comm.size == 1:
        return dataset
    name = Names("even_ends").of("more")

    def with_counts(element: Any, is_real: int) -> Any:
        """The batch, whether it is one, and its inputs."""
        rows = num_rows(tf.nest.flatten(element)[0])
        return element, tf.stack([tf.constant(is_real, tf.int64), rows])

    real = map_in_step(dataset, lambda *parts: with_counts(loosen(element_of(spec, parts)), 1))
    empty = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: with_counts(loosen(filler), 0))

    def ask(element: Any, own: tf.Tensor) -> Any:
        every = comm.sum(own, "control", name)
        if note is not None:
            share = own[1] * comm.size / tf.maximum(every[1], 1)
            element = note(element, tf.cast(share, tf.float32))
        return element, every[0]

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
    return scale_loss_by(loss, own * comm.size / tf.maximum(total, 1.0))


def scale_loss_by(loss: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Does what `scale_loss` does, where it is known what share of the step's inputs a rank has.

    Args:
        loss: as of `scale_loss`.
        share: scalar, inputs of this rank's batch over the mean of the ranks'.
    """
    loss = tf.where(share > 0, loss, tf.zeros_like(loss))
    scaled = loss * share
    return scaled + tf.stop_gradient(loss - scaled)


def with_next(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Adds the next batch's keys to each batch: features["next_keys"], laid out as "keys".

    The last batch gets keys of no inputs. For training data of sharded tables with `prefetch=True`.
    Put it last, after `Slipstream.apply` and `even_ends`; a `.prefetch` may follow. It asks for
    each batch one step ahead, as a `.prefetch(1)` would: a new threshold comes one batch later.

    Args:
        dataset: its elements are batches: features, or a tuple that begins with them. Features are
            a dictionary with "keys": a dense tensor, a RaggedTensor, or a dictionary of these.

    Raises:
        ValueError: there are no such features, they have "next_keys", or a component is neither
            dense nor ragged, or has no batch dimension.
    """
    spec = dataset.element_spec
    features = _features(spec)
    if not isinstance(features, Mapping) or KEYS not in features or NEXT_KEYS in features:
        allowed = f"features, a dictionary with {KEYS!r} and without {NEXT_KEYS!r}"
        raise invalid("dataset", spec, "with_next", allowed)
    end = loosen(no_inputs(spec, "with_next"))
    batches = map_in_step(dataset, lambda *parts: loosen(element_of(spec, parts)))

    def pair(before: tuple[tf.Tensor, ...], element: Any) -> Any:
        whole = tf.nest.pack_sequence_as(element, before, expand_composites=True)
        features = {**_features(whole), NEXT_KEYS: _features(element)[KEYS]}
        complete = (features, *whole[1:]) if isinstance(whole, tuple) else features
        return _tensors(element), complete

    # The first pair is of no batch with the first one.
    ended = batches.concatenate(tf.data.Dataset.from_tensors(end))
    paired = ended.scan(_tensors(end), pair).skip(1)
    count = int(dataset.cardinality().numpy())
    return paired.apply(tf.data.experimental.assert_cardinality(count)) if count > 0 else paired


def _tensors(element: Any) -> tuple[tf.Tensor, ...]:
    # The state of a scan is of dense tensors only.
    return tuple(tf.nest.flatten(element, expand_composites=True))


def _features(element: Any) -> Any:
    return element[0] if isinstance(element, tuple) else element
