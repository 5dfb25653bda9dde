"""Detects mistakes in the use of an engine with a model.

They raise errors before the first step, or warnings during training.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from slipstream_tf._compat import layers_in
from slipstream_tf._utils.errors import invalid
from slipstream_tf.keras.loss_feedback import LossFeedback


def require_fit(engine: Any, model: Any, engines: Sequence[Any]) -> None:
    """Raises ValueError if an engine does not match its `fit`.

    Args:
        engine: The `Slipstream` of a callback.
        model: The model of the `fit`.
        engines: The engines of all callbacks of the `fit`, including `engine`.
    """
    own = {id(store) for store in engine.store.parts}
    number = sum(any(id(store) in own for store in other.store.parts) for other in engines)
    if number > 1:
        allowed = "one slipstream.callback() for the tables of a layer: each counts every step"
        raise invalid("callbacks", f"{number} of Slipstream", "fit", allowed)
    inside = {id(layer) for layer in layers_in(model)}
    for layer in engine.layers:
        if id(layer) not in inside:
            name, place = f"layer {layer.name!r}", f"Slipstream in fit of model {model.name!r}"
            allowed = "a layer of this model. A loaded or cloned model has layers of its own, which"
            raise invalid("embeddings", name, place, f"{allowed} take a Slipstream of their own")
    if isinstance(model, LossFeedback):
        return
    names = ("train_step", "compute_loss")
    # A custom step can call `Slipstream.record_losses`.
    is_plain = all(getattr(type(model), name) is getattr(keras.Model, name) for name in names)
    if engine.settings.needs_losses and is_plain:
        allowed = (
            "slip.keras.Model(inputs, outputs), slip.keras.Sequential, or a class derived from "
            "slip.keras.Model: max_auc_loss and an estimate of cost need each example's loss, "
            "which a plain Keras model does not report"
        )
        name = f"{type(model).__name__} {model.name!r}"
        raise invalid("model", name, "fit with Slipstream", allowed)
    place = f"a fit of {type(model).__name__}, which is no slip.keras.Model"
    if engine.settings.examples.correction == "offset":
        raise invalid("correction", "offset", place, "'weight', which travels as sample weights")
    if engine.settings.subsamples_in_step:
        raise invalid("pilot", "model", place, "'fm', 'linear' or 'label'")


def warn_at_window_end(engine: Any, report: Any) -> None:
    """Warns about mistakes that are visible at the end of a window.

    Args:
        engine: A `Slipstream`.
        report: The report of the window.
    """
    if engine.settings.policies and engine.plan.is_exceeded_by(report.step):
        _warn(
            f"Training has taken {report.step:,} steps, but {engine.plan.steps:,} were planned: "
            "the warm-up and the windows were too short. Batches that are read may be larger than "
            "the batch_size that was given to Slipstream.apply. Make them by `.batch(n)` or "
            "`.rebatch(n)`, which tell their size, or give Window(planned_steps=)."
        )
    if report.window > 0:
        return
    if engine.settings.needs_losses and not engine.are_losses_recorded:
        is_bound = engine.settings.max_auc_loss is not None
        nothing = "nothing is skipped" if is_bound else "what skipping costs is not known"
        _warn(
            "A window has ended, and no step has told its inputs' losses, which the settings need: "
            f"{nothing}. Call `self.record_losses(x, losses, y)` in the train_step of a "
            "slip.keras.Model, or `slipstream.record_losses(x, losses, y)` in a loop of your own."
        )
    if engine.settings.subsamples_in_step and not report.examples_seen:
        _warn(
            "A window has ended in which no example was subsampled. The model is the pilot, but "
            "its train_step does not call `slipstream.subsample(batch, predictions)`. Add the "
            "call, or use another pilot."
        )
    (trained, read), steps = engine.batch_sizes, report.step
    if engine.comm.size > 1 or not trained or not read or report.examples_skipped:
        return
    # `Slipstream.apply` itself classifies up to two batches before they are trained.
    if report.examples_seen > steps * trained + 2 * max(trained, read):
        _warn(
            f"The first window classified {report.examples_seen:,} examples, but its {steps} steps "
            f"trained at most {steps * trained:,}: something fetches batches ahead of training, so "
            "that thresholds take effect late. Put Slipstream.apply last, behind .prefetch."
        )


def warn_without_steps(engine: Any, batches: int) -> None:
    """Warns if `apply` returned batches but the engine counted no step.

    Args:
        engine: A `Slipstream`.
        batches: Number of batches that `apply` has returned, for the message.
    """
    if engine.steps == 0:
        _warn(
            f"{batches} batches went through Slipstream.apply, but no step was counted: no window "
            "ends and nothing is skipped. Give `slipstream.callback()` to model.fit, or call "
            "`slipstream.step()` after each training step."
        )


def _warn(message: str) -> None:
    # Attributes the warning to the caller of the `Slipstream` method.
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def require_no_validation(engine: Any) -> None:
    """Raises ValueError if a result of `apply` is read during validation.

    It is called when an iteration over such a result begins.
    """
    if engine.is_validating:
        allowed = (
            "data that did not go through Slipstream.apply: it would leave examples out of them"
        )
        raise invalid("validation_data", "of Slipstream.apply", "fit", allowed)


_OWNERS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def take_over(engine: Any, store: Any) -> None:
    """Registers an engine as the only tracker of a store's tables.

    An engine that tracked them before is replaced; see `require_owner`.
    """
    for part in store.parts:
        _OWNERS[part] = weakref.ref(engine)


def require_owner(engine: Any, store: Any) -> None:
    """Raises ValueError if a later engine tracks tables of the store."""
    if any(_OWNERS[part]() is not engine for part in store.parts):
        allowed = "the Slipstream that was made last for these tables: both would set what they do"
        raise invalid("slipstream", "one that was made before another", "a step", allowed)
