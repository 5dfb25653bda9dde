"""Keras models that report the loss of each example to the engine.

The loss and its gradients are unchanged. `Slipstream.apply` adds notes to the features: additional
features such as "skippable" (see `sampling.notes`). The models remove the notes before `call`.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.data.spec import FRACTION_OF_STEP, OFFSET
from slipstream_tf.distributed.batches import scale_loss, scale_loss_by
from slipstream_tf.keras.contract import reaching_rows
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.sampling.notes import take_notes
from slipstream_tf.sampling.passes import Applied

Recorder = Callable[..., Any]
"""Function that records losses, as `Slipstream.record_losses`. Its arguments are the features that
`Slipstream.apply` returned, losses (float32 [batch]), labels (float32 [batch]) and `weights=`, the
sample weights (float32 [batch] or None). It returns an operation in a graph."""


Subsampler = Callable[[Any, tf.Tensor], Any]
"""Function that drops examples of a batch, as `Slipstream.subsample`. Its arguments are the batch,
`(x, y)` or `(x, y, sample_weight)`, and its predicted probabilities [batch]. It returns the
examples to train, with weights or offsets that correct for the dropped examples."""


# Any, because the Keras class next to the mixin defines the attributes.
_Mixin: Any = object


class LossFeedback(_Mixin):
    """A mixin for `keras.Model` that records the loss of each training example.

    Put it first in the list of base classes. `slip.keras.Model` includes it. Losses are recorded
    only in a `fit` with `slipstream.callback()`, and `max_auc_loss` or
    `DryRun(estimates_cost=True)`, which require a single output with binary cross-entropy.
    `Slipstream.apply` adds notes, such as "skippable", to the features. `train_step` and
    `compute_loss` receive the notes. The mixin removes them before `call`.

    A custom `train_step` records the losses if it calls `self.compute_loss(x=x, ...)`. Otherwise,
    call `self.record_losses(x, losses, y)`.

    Example:

    >>> class MyModel(slip.keras.LossFeedback, keras.Model):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed = slip.keras.Embedding(100, 4)
    ...         self.head = keras.layers.Dense(1, "sigmoid")
    ...
    ...     def call(self, inputs, training=None):
    ...         return self.head(self.embed(inputs, training=training))
    >>> model = MyModel()
    >>> model.compile("adam", "binary_crossentropy")
    >>> history = model.fit(np.array([5, 8]), np.array([0, 1]), verbose=0)
    """

    _recorder: Recorder | None = None
    _comm: Communicator | None = None
    _subsampler: Subsampler | None = None
    # The features whose losses were recorded in this training step; None outside of training.
    _recorded_inputs: list[Any] | None = None

    def observe_losses_with(self, recorder: Recorder | None) -> None:
        """Sets the function that receives the losses of training steps.

        Args:
            recorder: Function that is called once per training step, or None.
        """
        self._replace("_recorder", recorder)

    def subsample_with(self, subsampler: Subsampler | None) -> None:
        """Sets the function that drops examples by the predictions of the model.

        Args:
            subsampler: Function that is called in each `train_step`. None trains all examples.
        """
        self._replace("_subsampler", subsampler)

    def train_with(self, comm: Communicator | None) -> None:
        """Sets the ranks over which gradients are averaged, from the next step.

        The gradients of this rank are then scaled so that the average over the ranks equals the
        gradient over all examples, for any batch sizes (`distributed.scale_loss`).

        Args:
            comm: The ranks, or None for a single process.
        """
        self._replace("_comm", comm)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "checkpoint":
            return children
        # Keras leaves layers in lists, tuples and dictionaries out of TensorFlow checkpoints.
        found: collections.Counter[str] = collections.Counter()
        for layer in _compat.layers_in(self):
            if isinstance(layer, EmbeddingCollection):
                table = layer.tables[0].name
                children[f"rows_{table}_{found[table]}"] = layer._store_state
                found[table] += 1
        return children

    def _replace(self, name: str, value: Any) -> None:
        if getattr(self, name) == value:
            return
        # Bypasses attribute tracking, which would add the state of the callable to the model.
        object.__setattr__(self, name, value)
        if getattr(self, "train_function", None) is not None:
            # The traced function contains the old value.
            self.make_train_function(force=True)

    def compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        """Compiles the model like `keras.Model.compile`.

        An optimizer that needs all gradients at once (`clipnorm`, `global_clipnorm`, `clipvalue`,
        `gradient_accumulation_steps`, loss scaling) is converted to a `CombinedOptimizer`, if the
        embedding layers do not specify `apply`.
        """
        super().compile(reaching_rows(self, optimizer), *args, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model like `keras.Model.compile_from_config`."""
        if type(self).compile is not LossFeedback.compile:
            # Keras warns that it does not call a custom `compile`.
            return super().compile_from_config(config)
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built and self.optimizer is not None:
            self.optimizer.build(self.trainable_variables)

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains the model like `keras.Model.fit`.

        If `x` is the result of `Slipstream.apply`, `class_weight` is forwarded to
        `Slipstream.apply`, because Keras does not combine it with sample weights and would fetch
        batches ahead of the windows.
        """
        if isinstance(x, Applied) and x.reweigh and kwargs.get("class_weight") is not None:
            x = x.reweigh(kwargs.pop("class_weight"))
        return super().fit(x, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with the features, without the notes of the engine."""
        if args:
            args = (take_notes(args[0], self._input_names())[0], *args[1:])
        return super().__call__(*args, **kwargs)

    def _input_names(self) -> set[str]:
        """Returns the names of the inputs of a functional model.

        Inputs with these names are features, not notes.
        """
        inputs, nested = getattr(self, "inputs", None) or [], getattr(self, "_inputs_struct", None)
        return {tensor.name for tensor in inputs} | set(nested if isinstance(nested, dict) else ())

    def make_train_function(self, force: bool = False) -> Any:
        """Creates the train function, which records losses, like `keras.Model`.

        Args:
            force: Whether to replace an existing function.
        """
        before = getattr(self, "train_function", None)
        super().make_train_function(force=force)
        made = getattr(self, "train_function", None)
        if made is None or made is before:
            return made

        def train_function(*args: Any) -> Any:
            # A custom train_step is traced or runs eagerly inside of this call, too.
            with self._training():
                return made(*args)

        object.__setattr__(self, "train_function", train_function)
        return train_function

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        before = self._recorded_inputs
        object.__setattr__(self, "_recorded_inputs", [])
        try:
            yield
        finally:
            object.__setattr__(self, "_recorded_inputs", before)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one training step and records its losses."""
        with self._training():
            if self._subsampler is not None:
                args = (*args[:-1], self._subsampled(args[-1]))
            return super().train_step(*args, **kwargs)

    def _subsampled(self, data: Any) -> Any:
        """Returns the examples of a batch to train, selected by predicted loss."""
        assert self._subsampler is not None
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        self._require_click(y_pred, f"pilot='model' of {self._place()}", ". Use another pilot")
        if self._gives_logits():
            y_pred = tf.sigmoid(y_pred)
        y_pred = tf.stop_gradient(tf.reshape(y_pred, [-1]))
        return self._subsampler((x, y) if weights is None else (x, y, weights), y_pred)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss like `keras.Model`, and records example losses in training.

        Args:
            *args: Positional arguments of `keras.Model.compute_loss`: x, y, y_pred, sample_weight.
                Further arguments depend on the Keras version. x is required if losses are recorded.
                It must contain the notes of `Slipstream.apply`.
            **kwargs: The same arguments by name.

        Raises:
            ValueError: Losses are recorded, and x is missing or the loss is not the binary
                cross-entropy of a single output.
        """
        given = {**dict(zip(("x", "y", "y_pred", "sample_weight"), args, strict=False)), **kwargs}
        is_training = self._recorded_inputs is not None and given.get("training") is not False
        offset = self._offset_of(given.get("x")) if is_training else None
        if offset is None:
            loss = super().compute_loss(*args, **kwargs)
        else:
            loss = super().compute_loss(**{**given, "y_pred": self._shift(given["y_pred"], offset)})
        if not is_training or self._recorded_inputs is None:
            return loss
        if self._comm is not None:
            loss = self._scaled(loss, given)
        x = given.get("x")
        if self._recorder is None or any(x is known for known in self._recorded_inputs):
            return loss
        if x is None:
            allowed = (
                "the features of the batch, because losses are recorded. Call "
                "self.compute_loss(x=x, y=y, y_pred=y_pred)"
            )
            raise invalid("x", None, f"compute_loss of {self._place()}", allowed)
        losses, labels = self._click_losses(given["y"], given["y_pred"])
        recorded = self.record_losses(x, losses, labels, given.get("sample_weight"))
        with tf.control_dependencies([] if recorded is None else [recorded]):
            return tf.identity(loss)

    def _scaled(self, loss: Any, given: dict[str, Any]) -> Any:
        """Returns the loss, with its gradient scaled by the relative batch size."""
        assert self._comm is not None
        notes = take_notes(given.get("x"), self._input_names())[1]
        # If this step drops examples, the batch is smaller than the note assumes.
        if FRACTION_OF_STEP in notes and self._subsampler is None and self._comm.size > 1:
            return scale_loss_by(
                loss, tf.cast(tf.reduce_sum(notes[FRACTION_OF_STEP][:1]), loss.dtype)
            )
        return scale_loss(loss, tf.shape(tf.nest.flatten(given["y"])[0])[0], self._comm)

    def _offset_of(self, x: Any) -> Any:
        """Returns the note "log_odds_offset" of a batch, float32 [batch], or None."""
        return None if x is None else take_notes(x, self._input_names())[1].get(OFFSET)

    def _shift(self, y_pred: Any, offset: tf.Tensor) -> Any:
        """Adds the offset to the log odds of the predictions.

        The offset corrects the predictions for the different keep probabilities of clicks and
        non-clicks (`PredictedLoss(correction="offset")`).
        """
        place = f"{self._place()} with PredictedLoss(correction='offset')"
        self._require_click(y_pred, place, ". Pass correction='weight' for other losses")
        config: Any = getattr(getattr(self, "loss", None), "get_config", dict)()
        smoothing = config.get("label_smoothing", 0.0)
        if smoothing:
            allowed = (
                "0, because the offset applies to the log odds of labels that are not smoothed. "
                "Pass correction='weight' to use label smoothing"
            )
            raise invalid("label_smoothing", smoothing, place, allowed)
        y_pred = tf.cast(y_pred, tf.float32)
        offset = tf.reshape(offset, tf.shape(y_pred))
        if self._gives_logits():
            return y_pred + offset
        # For probabilities: p e^o / (p e^o + 1 - p).
        odds = y_pred * tf.exp(offset)
        return odds / (odds + 1.0 - y_pred)

    def record_losses(self, x: Any, losses: Any, y: Any, sample_weight: Any = None) -> Any:
        """Records the losses of a batch in a `train_step` without `compute_loss`.

        It has no effect if no engine needs the losses.

        Args:
            x: The features that `train_step` received.
            losses: Binary cross-entropy of each example before the update, without sample weight,
                float [batch].
            y: Labels 0 and 1, [batch] or [batch, 1].
            sample_weight: Weights of the examples, [batch] or [batch, 1]. None means 1.

        Returns:
            The operation in a graph, None in eager mode.

        Raises:
            ValueError: The losses of these features are already recorded in this step.
        """
        if self._recorder is None:
            return None
        if self._recorded_inputs is not None:
            if any(x is known for known in self._recorded_inputs):
                place = f"record_losses of {self._place()}"
                allowed = "one call per batch. Remove this call if compute_loss records losses"
                raise invalid("losses", "losses of a recorded batch", place, allowed)
            self._recorded_inputs.append(x)
        losses = tf.stop_gradient(tf.reshape(tf.cast(losses, tf.float32), [-1]))
        labels, weights = (
            None if part is None else tf.reshape(tf.cast(part, tf.float32), [-1])
            for part in (y, sample_weight)
        )
        return self._recorder(x, losses, labels, weights=weights)

    def _click_losses(self, y: Any, y_pred: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns losses and labels, float32 [batch]."""
        reason = (
            ", which max_auc_loss and DryRun(estimates_cost=True) require. Remove these settings, "
            "or call self.record_losses(x, losses, y) for one output in a custom train_step"
        )
        self._require_click(y_pred, self._place(), reason)
        labels = tf.reshape(tf.cast(y, tf.float32), [-1])
        return binary_cross_entropy(labels, y_pred, self._gives_logits()), labels

    def _require_click(self, y_pred: Any, place: str, remedy: str) -> None:
        """Raises ValueError unless the loss is binary cross-entropy of one output."""
        shape = None if tf.nest.is_nested(y_pred) else y_pred.shape
        is_single = shape is not None and (shape.rank == 1 or (shape.rank == 2 and shape[-1] == 1))
        if not is_single or self._gives_logits() is None:
            allowed = f"binary cross-entropy with one output{remedy}"
            raise invalid("loss", getattr(self, "loss", None), place, allowed)

    def _gives_logits(self) -> bool | None:
        """Returns whether the outputs are logits instead of probabilities.

        The result is None if the loss is not binary cross-entropy.
        """
        loss = getattr(self, "loss", None)
        if isinstance(loss, str):
            loss = keras.losses.get(loss)
        if loss is keras.losses.binary_crossentropy:
            return False
        click = keras.losses.BinaryCrossentropy
        # A subclass with a different `call` may be a different loss.
        if isinstance(loss, click) and type(loss).call is click.call:
            return bool(loss.get_config()["from_logits"])
        return None

    def _place(self) -> str:
        return f"model {getattr(self, 'name', '')!r}"


def binary_cross_entropy(labels: tf.Tensor, predictions: Any, are_logits: bool | None) -> tf.Tensor:
    """Computes the loss of each example, without weights and label smoothing.

    Args:
        labels: Labels, float32 [batch].
        predictions: Predictions, [batch] or [batch, 1].
        are_logits: Whether the predictions are logits. None or False: probabilities.

    Returns:
        Float32 [batch], without a gradient.
    """
    predictions = tf.stop_gradient(tf.reshape(tf.cast(predictions, tf.float32), [-1]))
    if not are_logits:
        # Clips like Keras, so that a probability of 0 or 1 has a finite loss.
        epsilon = keras.backend.epsilon()
        predictions = tf.clip_by_value(predictions, epsilon, 1.0 - epsilon)
        predictions = tf.math.log(predictions / (1.0 - predictions))
    return tf.nn.sigmoid_cross_entropy_with_logits(labels, predictions)


def _is_functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 2 or ("outputs" in kwargs and (len(args) == 1 or "inputs" in kwargs))


class Model(LossFeedback, keras.Model):
    """A `keras.Model` that records the loss of each training example.

    Use it like `keras.Model`, functional or as a base class. A saved functional model is loaded as
    a `slip.keras.Model`.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("user", 4), slip.Table("item", 4)])
    >>> keys = keras.Input([2], dtype="int64")
    >>> vectors = keras.layers.Flatten()(layer(keys))
    >>> model = slip.keras.Model(keys, keras.layers.Dense(1, "sigmoid")(vectors))
    >>> model.compile("adam", "binary_crossentropy")
    >>> history = model.fit(np.array([[1, 5], [2, 7]]), np.array([0, 1]), verbose=0)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates a functional model if inputs and outputs are given."""
        if cls is Model and _is_functional(args, kwargs):
            return super().__new__(FunctionalModel)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _is_functional(args, kwargs) and not isinstance(self, FunctionalModel):
            # Otherwise Keras makes `Model` and therefore all its subclasses functional.
            _make_functional(type(self))
        super().__init__(*args, **kwargs)


@keras.saving.register_keras_serializable(package="slipstream_tf")
class FunctionalModel(Model, _compat.functional_class()):  # type: ignore[misc]
    """The class of the object that `slip.keras.Model(inputs, outputs)` creates."""

    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(inputs, outputs, name=name, **kwargs)


@keras.saving.register_keras_serializable(package="slipstream_tf")
class Sequential(LossFeedback, keras.Sequential):
    """A `keras.Sequential` that records the loss of each training example.

    Example:

    >>> model = slip.keras.Sequential(
    ...     [slip.keras.Embedding(100, 4), keras.layers.Flatten(), keras.layers.Dense(1, "sigmoid")]
    ... )
    >>> model.compile("adam", "binary_crossentropy")
    >>> history = model.fit(np.array([[1, 5], [2, 7]]), np.array([0, 1]), verbose=0)
    """


def _make_functional(cls: type) -> None:
    """Replaces `Model` by `FunctionalModel` in the bases of a class, recursively."""
    if cls is not Model and issubclass(cls, Model):
        cls.__bases__ = tuple(FunctionalModel if base is Model else base for base in cls.__bases__)
        for base in cls.__bases__:
            if base is not FunctionalModel:
                _make_functional(base)
