"""Dataset transformations for ranks with different numbers or sizes of batches.

Ranks can run out of data at different steps, because each rank drops its examples independently. A
rank without data continues with empty batches. An empty batch changes no parameter and no count,
but its rank takes part in every collective.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.comm import CollectiveNames, Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.ops.features import num_rows

KEYS = "keys"
NEXT_KEYS = "next_keys"
"""Name of the feature with the keys of the next batch."""
_BATCH_SIZE = CollectiveNames("scale_loss")


def element_of(spec: Any, parts: tuple[Any, ...]) -> Any:
    """Returns the dataset element for the arguments of a `map` function.

    `Dataset.map` unpacks tuples into separate arguments and passes all other elements unchanged.

    Args:
        spec: The `element_spec` of the dataset.
        parts: The positional arguments that `map` passed to the function.
    """
    return parts if isinstance(spec, tuple) else parts[0]


def map_in_step(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Applies `dataset.map(function)` without computing elements ahead of demand.

    tf.data runs a `map` without side effects in advance, together with the transformations before
    it. Examples would then be classified before a window ends, and ranks would call collectives for
    batches that the training loop has not requested. The side effect in this function prevents
    that.

    Args:
        dataset: The dataset.
        function: A function as for `dataset.map`, without Python control flow on tensors.
    """

    @tf.autograph.experimental.do_not_convert
    def apply(*parts: Any) -> Any:
        # The timestamp is unused. Reading it counts as a side effect, therefore tf.data does not
        # run ahead.
        with tf.control_dependencies([tf.timestamp()]):
            return tf.nest.map_structure(tf.identity, function(*parts), expand_composites=True)

    return dataset.map(apply)


def no_inputs(element_spec: Any, place: str) -> Any:
    """Returns a batch with zero examples.

    Args:
        element_spec: The `element_spec` of a dataset of batches, or a part of it.
        place: The name of the caller, for error messages.

    Raises:
        ValueError: If a component is not a dense, ragged or sparse tensor with a batch dimension.
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
            allowed = (
                "dense tensors, RaggedTensors with one ragged dimension, or SparseTensors, with a "
                "batch dimension"
            )
            raise invalid("dataset", spec, place, allowed)
        return tf.zeros([0, *_known(spec.shape[1:])], spec.dtype)

    return tf.nest.map_structure(component, element_spec)


def loosen(element: Any) -> Any:
    """Returns a batch without static batch sizes and ragged widths.

    Call it in a `dataset.map` function. An empty batch has other sizes, and a dataset can contain
    both only if their static shapes agree.

    Args:
        element: A batch: a nested structure of dense, ragged and sparse tensors.
    """

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


def pad_to_equal_steps(
    dataset: tf.data.Dataset,
    comm: Communicator,
    note: Callable[[Any, tf.Tensor], Any] | None = None,
) -> tf.data.Dataset:
    """Pads the ranks' datasets with empty batches to the same length.

    Apply it last, after `Slipstream.apply`. Only `prefetch_keys` and `.prefetch` may follow. All
    ranks must iterate over the dataset at the same time and to its end, in training and in
    evaluation, because each batch is a collective.

    Note: do not stop an iteration early (`steps_per_epoch`, a callback that stops training). The
    ranks could then be one collective apart, and the next iteration would fail or hang.

    Example:

    >>> comm = slip.distributed.init()
    >>> dataset = slip.distributed.pad_to_equal_steps(tf.data.Dataset.range(6).batch(4), comm)
    >>> [len(batch) for batch in dataset.as_numpy_iterator()]
    [4, 2]

    Args:
        dataset: This rank's dataset. Its elements are batches: nested structures of dense, ragged
            and sparse tensors.
        comm: The communicator of the job.
        note: A function that is called like a function of `dataset.map`, with each batch and the
            number of its examples divided by the mean over the ranks (a float32 scalar). It returns
            the batch to yield. For example, `sampling.notes.note_fraction` stores the ratio in the
            batch, so that `keras.LossFeedback` needs no collective in each step. It is not called
            in a single process.

    Returns:
        A dataset with the same batches, followed by empty batches until all ranks have reached the
        end of their data. In a single process, the unchanged dataset.

    Raises:
        ValueError: If a component is not a dense, ragged or sparse tensor with a batch dimension.
    """
    spec = dataset.element_spec
    filler = no_inputs(spec, "pad_to_equal_steps")
    if comm.size == 1:
        return dataset
    name = CollectiveNames("pad_to_equal_steps").of("more")

    def with_counts(element: Any, is_real: int) -> Any:
        """Returns the batch and int64 [2], `is_real` and the batch size.

        `is_real` is 1 for a batch of the dataset and 0 for a batch of padding.
        """
        rows = num_rows(tf.nest.flatten(element)[0])
        return element, tf.stack([tf.constant(is_real, tf.int64), rows])

    real = map_in_step(dataset, lambda *parts: with_counts(loosen(element_of(spec, parts)), 1))
    # AutoGraph converts these functions more slowly than TensorFlow traces them.
    plain = tf.autograph.experimental.do_not_convert
    padding = plain(lambda _: with_counts(loosen(filler), 0))
    empty = tf.data.Dataset.from_tensors(0).repeat().map(padding)

    def ask(element: Any, own: tf.Tensor) -> Any:
        every = comm.sum(own, "control", name)
        if note is not None:
            fraction = own[1] * comm.size / tf.maximum(every[1], 1)
            element = note(element, tf.cast(fraction, tf.float32))
        return element, every[0]

    # `note` can be a function of the user, which may need AutoGraph.
    asked = real.concatenate(empty).map(ask if note else plain(ask))
    together = asked.take_while(plain(lambda _, count: count > 0))
    options = tf.data.Options()
    options.deterministic = True
    return map_in_step(together, lambda element, _: element).with_options(options)


@tf.autograph.experimental.do_not_convert
def scale_loss(loss: tf.Tensor, batch_size: Any, comm: Communicator) -> tf.Tensor:
    """Scales a rank's loss so that averaged gradients weight all examples equally.

    Batches of different ranks can differ in size. A plain average of their gradients would give
    more weight to the examples of small batches. This function is a collective.

    Example:

    >>> comm = slip.distributed.init()
    >>> float(slip.distributed.scale_loss(tf.constant(0.5), 32, comm))
    0.5

    Args:
        loss: The mean loss over the examples of this rank's batch, a float32 scalar. Any value is
            accepted for an empty batch.
        batch_size: The number of examples in this rank's batch, an integer scalar.
        comm: The communicator of the job.

    Returns:
        The loss (0 for an empty batch). Its gradient is multiplied by the number of ranks times
        `batch_size`, divided by the number of examples on all ranks. In a single process, the
        unchanged loss.
    """
    if comm.size == 1:
        return loss
    own = tf.cast(batch_size, loss.dtype)
    total = comm.sum(tf.reshape(own, [1]), "control", _BATCH_SIZE.of("batch_size"))[0]
    return scale_loss_by(loss, own * comm.size / tf.maximum(total, 1.0))


def scale_loss_by(loss: tf.Tensor, fraction: tf.Tensor) -> tf.Tensor:
    """Scales the gradient of a loss like `scale_loss`, with a known factor.

    Args:
        loss: The mean loss over the examples of this rank's batch, a float32 scalar.
        fraction: The number of examples in this rank's batch divided by the mean over the ranks, a
            scalar.

    Returns:
        The loss (0 if `fraction` is 0), with its gradient multiplied by `fraction`.
    """
    loss = tf.where(fraction > 0, loss, tf.zeros_like(loss))
    scaled = loss * fraction
    return scaled + tf.stop_gradient(loss - scaled)


def prefetch_keys(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Adds the keys of the next batch to each batch as `features["next_keys"]`.

    Use it for training data of sharded tables with `prefetch=True`. The last batch gets the keys of
    an empty batch. Apply it last, after `Slipstream.apply` and `pad_to_equal_steps`. Only
    `.prefetch` may follow. Like `.prefetch(1)`, it requests each batch one step early, therefore a
    new threshold takes effect one batch later.

    Example:

    >>> dataset = tf.data.Dataset.from_tensor_slices({"keys": np.arange(4)}).batch(2)
    >>> for features in slip.distributed.prefetch_keys(dataset):
    ...     print(features["keys"].numpy(), features["next_keys"].numpy())
    [0 1] [2 3]
    [2 3] []

    Args:
        dataset: A dataset of batches. A batch is a features dictionary, or a tuple that starts with
            it. `features["keys"]` is a dense tensor, a RaggedTensor, or a dictionary of these.

    Returns:
        The dataset with `"next_keys"`, in the same structure as `"keys"`.

    Raises:
        ValueError: If a batch has no features dictionary with `"keys"`, if it already has
            `"next_keys"`, or if a component is not a tensor with a batch dimension.
    """
    spec = dataset.element_spec
    features = _features(spec)
    if not isinstance(features, Mapping) or KEYS not in features or NEXT_KEYS in features:
        allowed = f"a features dictionary with {KEYS!r} and without {NEXT_KEYS!r}"
        raise invalid("dataset", spec, "prefetch_keys", allowed)
    end = loosen(no_inputs(spec, "prefetch_keys"))
    batches = map_in_step(dataset, lambda *parts: loosen(element_of(spec, parts)))

    @tf.autograph.experimental.do_not_convert
    def pair(before: tuple[tf.Tensor, ...], element: Any) -> Any:
        whole = tf.nest.pack_sequence_as(element, before, expand_composites=True)
        features = {**_features(whole), NEXT_KEYS: _features(element)[KEYS]}
        complete = (features, *whole[1:]) if isinstance(whole, tuple) else features
        return _tensors(element), complete

    # The first pair combines an empty batch with the first batch, so it is skipped.
    ended = batches.concatenate(tf.data.Dataset.from_tensors(end))
    paired = ended.scan(_tensors(end), pair).skip(1)
    count = int(dataset.cardinality().numpy())
    return paired.apply(tf.data.experimental.assert_cardinality(count)) if count > 0 else paired


def _tensors(element: Any) -> tuple[tf.Tensor, ...]:
    # `Dataset.scan` accepts only dense tensors as its state.
    return tuple(tf.nest.flatten(element, expand_composites=True))


def _features(element: Any) -> Any:
    return element[0] if isinstance(element, tuple) else element
