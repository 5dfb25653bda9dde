"""The keys of the next batch, sent to their owners while this one trains.

In: what a batch asks for, announced a step ahead. Out: the same at the batch's lookup, which then
has only rows to wait for: they are read there, after the update before it, and never stale.
"""

from __future__ import annotations

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
    """Keys that this rank asks for, and those it is asked for.

    Attributes:
        sizes: int64 [ranks, parcels], keys that each rank is asked for; a parcel is a table's, or,
            where copies are kept, one of two.
        keys: int64 [n], by rank, then by table.
        asked_sizes: int64 [ranks, parcels], keys that each rank asks for.
        asked: int64 [m], by rank, then by table.
    """

    sizes: tf.Tensor
    keys: tf.Tensor
    asked_sizes: tf.Tensor
    asked: tf.Tensor


class AnnouncedKeys:
    """The request of the batch that comes next, if it was announced.

    Whether one is there, and holds, is decided by calls that all ranks make alike: it never depends
    on a rank's own keys.
    """

    def __init__(self, ranks: int, parcels: int):
        """Makes room for one request.

        Args:
            ranks: of the job.
            parcels: of a rank, see `KeyRequest`.
        """
        with tf.device("CPU:0"):
            self._is_announced = tf.Variable(False, trainable=False)
            self._holds = tf.Variable(False, trainable=False)
            self._batch = _vector()
            self._request = KeyRequest(
                _matrix(ranks, parcels), _vector(), _matrix(ranks, parcels), _vector()
            )

    def announce(self, batch: tf.Tensor, request: Callable[[], KeyRequest]) -> None:
        """Takes in a batch.

        Args:
            batch: from `identity_of`.
            request: asks the other ranks; a collective.

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
                self._holds.assign(True)

    def take(self, batch: tf.Tensor, request: Callable[[], KeyRequest]) -> KeyRequest:
        """Gives out the request of a batch; there is none after it.

        Args:
            batch: from `identity_of`.
            request: asks the other ranks, if no batch was announced or what was asked then does not
                hold any more; a collective.

        Raises:
            tf.errors.InvalidArgumentError: another batch was announced.
        """
        with tf.device("CPU:0"):
            announced = self._batch.read_value()
            is_right = ~self._is_announced.read_value() | _are_equal(announced, batch)
            told = [_NOT_ANNOUNCED, tf.size(announced), tf.size(batch)]
            checked = tf.debugging.Assert(is_right, told)
            with tf.control_dependencies([] if checked is None else [checked]):
                there = KeyRequest(*(variable.read_value() for variable in self._request))
                given = KeyRequest(*_either(self._holds.read_value(), there, request))
                self.forget()
        return given

    def outdate(self) -> None:
        """Has the announced batch ask again at its lookup: other copies may be there then."""
        with tf.device("CPU:0"):
            self._holds.assign(False)

    def forget(self) -> None:
        """Lets any batch come next."""
        with tf.device("CPU:0"):
            self._is_announced.assign(False)
            self._holds.assign(False)


def identity_of(packed: PackedFeatures, feature_table: Sequence[int]) -> tf.Tensor:
    """Returns int64 [n], equal for batches that ask for the same keys; weights do not matter.

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
    kept = tf.function(lambda given: given[: len(there)], autograph=False)
    return tf.raw_ops.If(
        cond=condition,
        input=inputs,
        Tout=[tensor.dtype for tensor in there],
        then_branch=kept.get_concrete_function(specs),
        else_branch=made,
        output_shapes=[tensor.shape for tensor in there],
    )


def _vector() -> tf.Variable:
    return tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)


def _matrix(ranks: int, parcels: int) -> tf.Variable:
    return tf.Variable(tf.zeros([ranks, parcels], tf.int64), trainable=False)
