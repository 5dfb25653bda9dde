"""Tells the saturation engine each input's loss while a Keras model trains.

In: the features, labels and predictions of a training step. Out: a call of a recorder with the
batch's ids, losses, labels and which could be skipped. The loss and its gradients are untouched.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf.distributed.batches import scale_loss
from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.errors import invalid
from slipstream_tf.inputs.spec import ID, SKIPPABLE

Recorder = Callable[[Any, tf.Tensor, tf.Tensor, Any, Any], Any]
"""Called with ids (int64 [batch] or None), losses and labels (float32 [batch]), skippable (bool
[batch] or None) and sample weights (float32 [batch] or None); returns an operation in a graph."""


class LossFeedback:
    """A mixin for `keras.Model`s with one output and binary cross-entropy; put it first.

        class MyModel(slip.keras.LossFeedback, keras.Model): ...

    The features must be a mapping for "id" and "skippable" to be found; the model's `call` must
    ignore them.
    """

    _recorder: Recorder | None = None
    _comm: Communicator | None = None
    _is_in_train_step = False

    def observe_losses_with(self, recorder: Recorder | None) -> None:
        """Sets what is told the losses of the training steps from now on.

        Args:
            recorder: called once per training step; None: nobody is told.
        """
        self._replace("_recorder", recorder)

    def train_with(self, comm: Communicator | None) -> None:
        """Sets the ranks whose losses are averaged, from the next step on.

        Gradients are then scaled so that their average over the ranks is that of all inputs, of
        whatever sizes the ranks' batches are (`distributed.scale_loss`).

        Args:
            comm: the ranks; None: this process alone.
        """
        self._replace("_comm", comm)

    def _replace(self, name: str, value: Any) -> None:
        if getattr(self, name) == value:
            return
        # Past Keras, which would track a callable object's state as the model's.
        object.__setattr__(self, name, value)
        if getattr(self, "train_function", None) is not None:
            # What was traced is of before.
            model: Any = self
            model.make_train_function(force=True)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one training step, whose losses are recorded."""
        object.__setattr__(self, "_is_in_train_step", True)
        try:
            base: Any = super()
            return base.train_step(*args, **kwargs)
        finally:
            object.__setattr__(self, "_is_in_train_step", False)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss as `keras.Model` does, and records the inputs' own in training.

        Args:
            *args: of `keras.Model.compute_loss`: x, y, y_pred, sample_weight; which more it has
                depends on the version of Keras.
            **kwargs: the same by name.

        Raises:
            ValueError: the model has another loss than binary cross-entropy.
        """
        base: Any = super()
        loss = base.compute_loss(*args, **kwargs)
        if not self._is_in_train_step:
            return loss
        given = {**dict(zip(("x", "y", "y_pred", "sample_weight"), args, strict=False)), **kwargs}
        if self._comm is not None:
            loss = scale_loss(loss, tf.shape(given["y"])[0], self._comm)
        if self._recorder is None:
            return loss
        labels = tf.reshape(tf.cast(given["y"], tf.float32), [-1])
        losses = binary_cross_entropy(labels, given["y_pred"], self._gives_logits())
        features = given["x"] if isinstance(given["x"], Mapping) else {}
        weights = given.get("sample_weight")
        if weights is not None:
            weights = tf.reshape(tf.cast(weights, tf.float32), [-1])
        ids, skippable = features.get(ID), features.get(SKIPPABLE)
        recorded = self._recorder(ids, losses, labels, skippable, weights)
        with tf.control_dependencies([] if recorded is None else [recorded]):
            return tf.identity(loss)

    def _gives_logits(self) -> bool:
        loss = getattr(self, "loss", None)
        if isinstance(loss, str):
            loss = keras.losses.get(loss)
        if loss is keras.losses.binary_crossentropy:
            return False
        if isinstance(loss, keras.losses.BinaryCrossentropy):
            return bool(loss.get_config()["from_logits"])
        place = f"model {getattr(self, 'name', '')!r}, whose losses are recorded"
        allowed = "'binary_crossentropy' or keras.losses.BinaryCrossentropy(...) for one output"
        raise invalid("loss", loss, place, allowed)


def binary_cross_entropy(labels: tf.Tensor, predictions: Any, are_logits: bool) -> tf.Tensor:
    """The loss of each input, without weights or label smoothing.

    Args:
        labels: float32 [batch].
        predictions: [batch] or [batch, 1].
        are_logits: whether they are logits instead of probabilities.

    Returns:
        float32 [batch], without a gradient.
    """
    predictions = tf.stop_gradient(tf.reshape(tf.cast(predictions, tf.float32), [-1]))
    if not are_logits:
        # As Keras does: a probability of 0 or 1 has a finite loss.
        epsilon = keras.backend.epsilon()
        predictions = tf.clip_by_value(predictions, epsilon, 1.0 - epsilon)
        predictions = tf.math.log(predictions / (1.0 - predictions))
    return tf.nn.sigmoid_cross_entropy_with_logits(labels, predictions)
