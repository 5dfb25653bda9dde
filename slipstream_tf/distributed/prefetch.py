"""The keys of the next batch, sent to their owners while this one trains.

In: what a batch requests, announced a step ahead. Out: the same at the batch's lookup, which then
has only rows to wait for: they are read there, after the update before it, and never stale.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from slipstream_tf.ops.features import PackedFeatures

_NOT_ANNOUNCED = (
    "This is not the batch that was announced (next_inputs, or `announce`). Look up the announced "
    "one, or call forget_announced() of the store on all ranks, as where an epoch ends. Numbers of "
    "its layout and keys: announced, given:"
)
_ANNOUNCED_TWICE = (
    "A batch is announced already, and was not looked up. A store has room for one: announce the "
    "next batch once a step, after the lookup of this one."
)


class KeyRequest(NamedTuple):
    """Keys that are requested of this rank.

    Attributes:
        sizes: int64 [ranks, tables], keys that each rank requests.
        keys: int64 [n], by rank, then by table.
    """

    sizes: tf.Tensor
    keys: tf.Tensor


class AnnouncedKeys:
    """The request of the batch that comes next, if it was announced.

    Whether there is one follows from calls that all ranks make alike, never from a rank's own keys.
    """

    def __init__(self, ranks: int, tables: int):
        """Makes room for one request.

        Args:
            ranks: of the job.
            tables: of the store.
        """
        with tf.device("CPU:0"):
            self._is_announced = tf.Variable(False, trainable=False)
            self._batch, keys = (
                tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
                for _ in range(2)
            )
            sizes = tf.Variable(tf.zeros([ranks, tables], tf.int64), trainable=False)
            self._request = KeyRequest(sizes, keys)

    def announce(self, batch: tf.Tensor, request: Callable[[], KeyRequest]) -> None:
        """Takes in a batch.

        Args:
            batch: from `identity_of`.
            request: requests its keys of the other ranks; a collective.

        Raises:
            tf.errors.InvalidArgumentError: another one is there.
        """
        with tf.device("CPU:0"):
            is_taken = self._is_announced.read_value()
            free = tf.debugging.Assert(~is_taken, [_ANNOUNCED_TWICE])
            # A variable that a graph assigns a value of known size to is taken to have that size
            # wherever the graph reads it, even before, where it holds another batch. So the size is
            # one that TensorFlow cannot know before it runs the graph.
            size = tf.where(is_taken, 0, tf.size(batch))
            # The batch, too: a step whose data has ended runs what does not wait for it.
            with tf.control_dependencies([batch] if free is None else [free, batch]):
                for variable, value in zip(self._request, request(), strict=True):
                    variable.assign(value)
                self._batch.assign(batch[:size])
                self._is_announced.assign(True)

    def take(self, batch: tf.Tensor, request: Callable[[], KeyRequest]) -> KeyRequest:
        """Gives out the request of a batch; there is none after it.

        Args:
            batch: from `identity_of`.
            request: requests its keys of the other ranks, if no batch was announced; a collective.

        Raises:
            tf.errors.InvalidArgumentError: another batch was announced.
        """
        with tf.device("CPU:0"):
            announced = self._batch.read_value()
            is_announced = self._is_announced.read_value()
            is_right = ~is_announced | _are_equal(announced, batch)
            told = [_NOT_ANNOUNCED, tf.size(announced), tf.size(batch)]
            checked = tf.debugging.Assert(is_right, told)
            with tf.control_dependencies([] if checked is None else [checked]):
                there = KeyRequest(*(variable.read_value() for variable in self._request))
                given = KeyRequest(*_either(is_announced, there, request))
                self.forget()
        return given

    def forget(self) -> None:
        """Lets any batch come next."""
        with tf.device("CPU:0"):
            self._is_announced.assign(False)


def identity_of(packed: PackedFeatures, feature_table: Sequence[int]) -> tf.Tensor:
    """Returns int64 [n], equal for batches that request the same keys; weights do not matter.

    Args:
        packed: the batch.
        feature_table: per feature, the index of its table.
    """
    layout = [len(packed.keys), len(packed.row_splits), len(feature_table), *feature_table]
    for name in ("feature_keys", "feature_column", "feature_splits"):
        layout += packed.attrs[name]
    parts = [tf.constant(layout, tf.int64)]
    for tensor in (*packed.keys, *packed.row_splits):
        parts += [tf.shape(tensor, tf.int64), tf.reshape(tensor, [-1])]
    return tf.concat(parts, axis=0)


def _are_equal(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    common = tf.minimum(tf.size(a), tf.size(b))
    are_same = tf.reduce_all(tf.equal(a[:common], b[:common]))
    return tf.equal(tf.size(a), tf.size(b)) & are_same


def _either(
    condition: tf.Tensor, there: Sequence[tf.Tensor], make: Callable[[], Sequence[tf.Tensor]]
) -> Sequence[tf.Tensor]:
    """`tf.cond(condition, lambda: there, make)`, in which collectives keep their names.

    `tf.cond` becomes nodes of the graph around it, numbered by what else that graph has. It differs
    between ranks that traced a function for batches of other sizes: they would wait for each
    other's collectives for ever. Here `make` stays a function of its own.
    """
    if tf.executing_eagerly():
        return there if condition else make()
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in there]
    made = tf.function(lambda given: make(), autograph=False).get_concrete_function(specs)
    inputs = [*there, *made.captured_inputs]
    specs += [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in made.captured_inputs]
    unchanged = tf.function(lambda given: given[: len(there)], autograph=False)
    return tf.raw_ops.If(
        cond=condition,
        input=inputs,
        Tout=[tensor.dtype for tensor in there],
        then_branch=unchanged.get_concrete_function(specs),
        else_branch=made,
        output_shapes=[tensor.shape for tensor in there],
    )
