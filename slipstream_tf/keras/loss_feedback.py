"""Reports the loss of each example to the engine while a Keras model trains.

In: the features, labels and predictions of a training step. Out: a call of a recorder with the
batch's features, losses and labels. The loss and its gradients stay unchanged, and the model
receives the features without the engine's notes. `Model` and `Sequential` are Keras's with this.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.data.spec import OFFSET, SHARE
from slipstream_tf.distributed.batches import scale_loss, scale_loss_by
from slipstream_tf.keras.contract import reaching_rows
from slipstream_tf.sampling.notes import take_notes
from slipstream_tf.sampling.passes import Applied

Recorder = Callable[..., Any]
"""Called with the features as `Slipstream.apply` gave them, losses (float32 [batch]), labels
(float32 [batch]) and `weights=`, the sample weights (float32 [batch] or None); returns an operation
in a graph."""


Thinner = Callable[[Any, tf.Tensor], Any]
"""Called with a batch `(x, y)` or `(x, y, sample_weight)` and its predictions, probabilities
[batch]; returns the part of it that is trained, with what corrects for the rest."""


# Any, because attributes come from the Keras class that it is mixed into.
_Mixin: Any = object


class LossFeedback(_Mixin):
    """A mixin for `keras.Model`s, whose training tells each input's loss; put it first.

        class MyModel(slip.keras.LossFeedback, keras.Model): ...

    `slip.keras.Model` has it. Losses are recorded for `max_auc_loss` and estimates of cost, which
    need one output with binary cross-entropy. The notes that `Slipstream.apply`
    adds to the features are removed before the model's `call`; `train_step` and `compute_loss` get
    the features with them.

    A `train_step` of one's own tells the losses, too, where it calls `self.compute_loss(x=x, ...)`;
    else by one call: `self.record_losses(x, losses, y)`.
    """

    _recorder: Recorder | None = None
    _comm: Communicator | None = None
    _thinner: Thinner | None = None
    # The features whose losses this training step has told; None outside of training.
    _told: list[Any] | None = None

    def observe_losses_with(self, recorder: Recorder | None) -> None:
        """Sets what is told the losses of the training steps from now on.

        Args:
            recorder: called once per training step; None: nobody is told.
        """
        self._replace("_recorder", recorder)

    def thin_batches_with(self, thinner: Thinner | None) -> None:
        """Sets what leaves examples out of each batch by the model's own predictions.

        Args:
            thinner: called in each `train_step`; None: all are trained.
        """
        self._replace("_thinner", thinner)

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
            self.make_train_function(force=True)

    def compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        """Compiles the model, as `keras.Model.compile` does.

        An optimizer that needs all gradients at once (`clipnorm`, `global_clipnorm`, `clipvalue`,
        `gradient_accumulation_steps`, loss scaling) becomes a `StepOptimizer`, where embedding
        layers have no `apply` of their own.
        """
        super().compile(reaching_rows(self, optimizer), *args, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a model that is loaded, as `keras.Model.compile_from_config` does."""
        if type(self).compile is not LossFeedback.compile:
            # It warns that a `compile` of one's own is not called.
            return super().compile_from_config(config)
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built and self.optimizer is not None:
            self.optimizer.build(self.trainable_variables)

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains the model, as `keras.Model.fit` does.

        A `class_weight` goes to `Slipstream.apply`, where `x` is what it returned: Keras takes none
        beside sample weights, and would fetch batches ahead of the windows.
        """
        if isinstance(x, Applied) and x.reweigh and kwargs.get("class_weight") is not None:
            x = x.reweigh(kwargs.pop("class_weight"))
        return super().fit(x, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with the features as they were before `Slipstream.apply`."""
        if args:
            args = (take_notes(args[0], self._input_names())[0], *args[1:])
        return super().__call__(*args, **kwargs)

    def _input_names(self) -> set[str]:
        """Names of a functional model's inputs, which are features and no notes."""
        inputs, nested = getattr(self, "inputs", None) or [], getattr(self, "_inputs_struct", None)
        return {tensor.name for tensor in inputs} | set(nested if isinstance(nested, dict) else ())

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function of a training step, as Keras does, in which losses are told.

        Args:
            force: whether it is made anew.
        """
        before = getattr(self, "train_function", None)
        super().make_train_function(force=force)
        made = getattr(self, "train_function", None)
        if made is None or made is before:
            return made

        def train_function(*args: Any) -> Any:
            # Steps are traced, or run eagerly, in here: also those of a train_step of one's own.
            with self._training():
                return made(*args)

        object.__setattr__(self, "train_function", train_function)
        return train_function

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        before = self._told
        object.__setattr__(self, "_told", [])
        try:
            yield
        finally:
            object.__setattr__(self, "_told", before)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one training step, whose losses are recorded."""
        with self._training():
            if self._thinner is not None:
                args = (*args[:-1], self._thinned(args[-1]))
            return super().train_step(*args, **kwargs)

    def _thinned(self, data: Any) -> Any:
        """The part of a batch that is trained, by what the model predicts for all of it."""
        assert self._thinner is not None
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        self._require_click(y_pred, f"pilot='model' of {self._place()}", ", or another pilot")
        if self._gives_logits():
            y_pred = tf.sigmoid(y_pred)
        y_pred = tf.stop_gradient(tf.reshape(y_pred, [-1]))
        return self._thinner((x, y) if weights is None else (x, y, weights), y_pred)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss as `keras.Model` does, and records the inputs' own in training.

        Args:
            *args: of `keras.Model.compute_loss`: x, y, y_pred, sample_weight; which more it has
                depends on the version of Keras. In training x must be there, with what
                `Slipstream.apply` wrote beside the features.
            **kwargs: the same by name.

        Raises:
            ValueError: losses are recorded, and the loss is not binary cross-entropy of one output,
                or x is missing.
        """
        given = {**dict(zip(("x", "y", "y_pred", "sample_weight"), args, strict=False)), **kwargs}
        is_training = self._told is not None and given.get("training") is not False
        offset = self._offset_of(given.get("x")) if is_training else None
        if offset is None:
            loss = super().compute_loss(*args, **kwargs)
        else:
            loss = super().compute_loss(**{**given, "y_pred": self._shift(given["y_pred"], offset)})
        if not is_training or self._told is None:
            return loss
        if self._comm is not None:
            loss = self._scaled(loss, given)
        x = given.get("x")
        if self._recorder is None or any(x is told for told in self._told):
            return loss
        if x is None:
            allowed = "the features of the batch: self.compute_loss(x=x, y=y, y_pred=y_pred)"
            raise invalid("x", None, f"compute_loss of {self._place()}", allowed)
        losses, labels = self._click_losses(given["y"], given["y_pred"])
        recorded = self.record_losses(x, losses, labels, given.get("sample_weight"))
        with tf.control_dependencies([] if recorded is None else [recorded]):
            return tf.identity(loss)

    def _scaled(self, loss: Any, given: dict[str, Any]) -> Any:
        """The loss, whose gradient is this rank's part of that of all inputs of the step."""
        assert self._comm is not None
        notes = take_notes(given.get("x"), self._input_names())[1]
        # What thinning has left of a batch is another share.
        if SHARE in notes and self._thinner is None and self._comm.size > 1:
            return scale_loss_by(loss, tf.cast(tf.reduce_sum(notes[SHARE][:1]), loss.dtype))
        return scale_loss(loss, tf.shape(tf.nest.flatten(given["y"])[0])[0], self._comm)

    def _offset_of(self, x: Any) -> Any:
        """What the log-odds of a batch's predictions are shifted by in training; None: nothing."""
        return None if x is None else take_notes(x, self._input_names())[1].get(OFFSET)

    def _shift(self, y_pred: Any, offset: tf.Tensor) -> Any:
        """Predictions for what thinning has left of the examples, whose log-odds are shifted."""
        place = f"{self._place()} by ForeseenLoss's offset"
        self._require_click(y_pred, place, ", or correct='weight'")
        config: Any = getattr(getattr(self, "loss", None), "get_config", dict)()
        smoothing = config.get("label_smoothing", 0.0)
        if smoothing:
            allowed = "0, or correct='weight': smoothed labels have other log-odds"
            raise invalid("label_smoothing", smoothing, f"{self._place()}, thinned", allowed)
        y_pred = tf.cast(y_pred, tf.float32)
        offset = tf.reshape(offset, tf.shape(y_pred))
        if self._gives_logits():
            return y_pred + offset
        # Of probabilities: p e^o / (p e^o + 1 - p).
        odds = y_pred * tf.exp(offset)
        return odds / (odds + 1.0 - y_pred)

    def record_losses(self, x: Any, losses: Any, y: Any, sample_weight: Any = None) -> Any:
        """Tells the losses of a batch, in a `train_step` that does not call `compute_loss`.

        Does nothing where no engine needs them.

        Args:
            x: the features as `train_step` got them.
            losses: float [batch], each input's binary cross-entropy before the update, without
                sample weight.
            y: labels, 0 and 1, [batch] or [batch, 1].
            sample_weight: of the inputs, [batch] or [batch, 1]; None: 1.

        Returns:
            The operation in a graph, None in eager mode.

        Raises:
            ValueError: the losses of these features were recorded in this step already.
        """
        if self._recorder is None:
            return None
        if self._told is not None:
            if any(x is told for told in self._told):
                place = f"record_losses of {self._place()}"
                raise invalid("losses", "a second time", place, "once: compute_loss records them")
            self._told.append(x)
        losses = tf.stop_gradient(tf.reshape(tf.cast(losses, tf.float32), [-1]))
        labels, weights = (
            None if part is None else tf.reshape(tf.cast(part, tf.float32), [-1])
            for part in (y, sample_weight)
        )
        return self._recorder(x, losses, labels, weights=weights)

    def _click_losses(self, y: Any, y_pred: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns losses and labels, float32 [batch]."""
        reason = (
            ": max_auc_loss and an estimate of cost extend a learning curve of AUC. Leave them out "
            "for other losses, or call self.record_losses(x, losses, y) for one output in your own "
            "train_step"
        )
        self._require_click(y_pred, self._place(), reason)
        labels = tf.reshape(tf.cast(y, tf.float32), [-1])
        return binary_cross_entropy(labels, y_pred, self._gives_logits()), labels

    def _require_click(self, y_pred: Any, place: str, others: str) -> None:
        """Raises ValueError unless the loss is the binary cross-entropy of one output."""
        shape = None if tf.nest.is_nested(y_pred) else y_pred.shape
        is_single = shape is not None and (shape.rank == 1 or (shape.rank == 2 and shape[-1] == 1))
        if not is_single or self._gives_logits() is None:
            allowed = f"binary cross-entropy of one output{others}"
            raise invalid("loss", getattr(self, "loss", None), place, allowed)

    def _gives_logits(self) -> bool | None:
        """Whether outputs are logits instead of probabilities; None: the loss is another one."""
        loss = getattr(self, "loss", None)
        if isinstance(loss, str):
            loss = keras.losses.get(loss)
        if loss is keras.losses.binary_crossentropy:
            return False
        click = keras.losses.BinaryCrossentropy
        # What is derived from it may be another loss.
        if isinstance(loss, click) and type(loss).call is click.call:
            return bool(loss.get_config()["from_logits"])
        return None

    def _place(self) -> str:
        return f"model {getattr(self, 'name', '')!r}, whose losses are recorded"


def binary_cross_entropy(labels: tf.Tensor, predictions: Any, are_logits: bool | None) -> tf.Tensor:
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


def _is_functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 2 or ("outputs" in kwargs and (len(args) == 1 or "inputs" in kwargs))


class Model(LossFeedback, keras.Model):
    """`keras.Model`, functional or as a base class, whose training tells each input's loss.

        model = slip.keras.Model(inputs, outputs)
        class MyModel(slip.keras.Model): ...

    Nothing else is different. Saved functional models are `slip.keras.Model`s again.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a functional model where inputs and outputs are given."""
        if cls is Model and _is_functional(args, kwargs):
            return super().__new__(FunctionalModel)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _is_functional(args, kwargs) and not isinstance(self, FunctionalModel):
            # Keras would make `Model` itself functional, and with it all that is derived from it.
            _make_functional(type(self))
        super().__init__(*args, **kwargs)


@keras.saving.register_keras_serializable(package="slipstream_tf")
class FunctionalModel(Model, _compat.functional_class()):  # type: ignore[misc]
    """What `Model(inputs, outputs)` returns."""

    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(inputs, outputs, name=name, **kwargs)


@keras.saving.register_keras_serializable(package="slipstream_tf")
class Sequential(LossFeedback, keras.Sequential):
    """`keras.Sequential`, whose training tells each input's loss."""


def _make_functional(cls: type) -> None:
    """Replaces `Model` by `FunctionalModel` among a class's bases and theirs."""
    if cls is not Model and issubclass(cls, Model):
        cls.__bases__ = tuple(FunctionalModel if base is Model else base for base in cls.__bases__)
        for base in cls.__bases__:
            if base is not FunctionalModel:
                _make_functional(base)
