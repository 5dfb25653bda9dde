"""What goes wrong where an engine, a model and a `fit` are put together, in a sentence each.

In: the parts. Out: errors before the first step, and warnings while it runs.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from slipstream_tf._compat import layers_in
from slipstream_tf._utils.errors import invalid
from slipstream_tf.keras.loss_feedback import LossFeedback


def require_fit(engine: Any, model: Any, beside: Sequence[Any]) -> None:
    """Raises ValueError if a model, or callbacks, cannot be in one `fit` with an engine.

    Args:
        engine: a `Slipstream`.
        model: of the `fit`.
        beside: the engines of all its callbacks.
    """
    require_one_engine(engine, beside)
    for layer in engine.layers:
        require_layer(layer, model)
    if engine.settings.needs_losses:
        require_losses(model)
    if isinstance(model, LossFeedback):
        return
    place = f"a fit of {type(model).__name__}, which is no slip.keras.Model"
    if engine.settings.examples.correct == "offset":
        raise invalid("correct", "offset", place, "'weight', which travels as sample weights")
    if engine.settings.thins_in_step:
        raise invalid("pilot", "model", place, "'fm', 'linear' or 'label'")


def warn_at_window_end(engine: Any, report: Any) -> None:
    """Warns once of what can be seen when an engine's first window has ended.

    Args:
        engine: a `Slipstream`.
        report: the window's.
    """
    if engine.settings.policies and engine.plan.is_exceeded_by(report.step):
        warn_of_more_steps(report.step, engine.plan.steps)
    if report.window > 0:
        return
    if engine.settings.needs_losses and not engine.are_losses_told:
        warn_without_losses(engine.settings.max_auc_loss is not None)
    if engine.settings.thins_in_step and not report.examples_seen:
        warnings.warn(
            "A window has ended in which no example was thinned: the model is the pilot, and its "
            "own train_step does not ask it. Call `slipstream.thin(batch, predictions)` there, "
            "or take another pilot.",
            RuntimeWarning,
            stacklevel=4,
        )
    trained, read = engine.batch_sizes
    if engine.comm.size == 1 and trained and read and not report.examples_skipped:
        warn_of_batches_ahead(report.step, report.examples_seen, trained, read)


def require_losses(model: Any) -> None:
    """Raises ValueError if a model cannot tell its inputs' losses."""
    names = ("train_step", "compute_loss")
    # A step of its own may call `Slipstream.record_losses`.
    is_plain = all(getattr(type(model), name) is getattr(keras.Model, name) for name in names)
    if not is_plain or isinstance(model, LossFeedback):
        return
    allowed = (
        "slip.keras.Model(inputs, outputs), slip.keras.Sequential, or a class derived from "
        "slip.keras.Model: max_auc_loss and an estimate of cost need each example's loss, which a "
        "plain Keras model does not report"
    )
    name = f"{type(model).__name__} {model.name!r}"
    raise invalid("model", name, "fit with Slipstream", allowed)


def require_layer(layer: Any, model: Any) -> None:
    """Raises ValueError if an engine's layer is not in a model."""
    if any(layer is other for other in layers_in(model)):
        return
    name = f"layer {layer.name!r}"
    place = f"Slipstream in fit of model {model.name!r}"
    allowed = "a layer of this model. A loaded or cloned model has layers of its own, which take a "
    raise invalid("embeddings", name, place, allowed + "Slipstream of their own")


def require_one_engine(engine: Any, beside: Sequence[Any]) -> None:
    """Raises ValueError unless an engine is the only one of its tables in a `fit`, and once in it.

    Args:
        engine: a `Slipstream`.
        beside: the engines of all callbacks of the `fit`, itself included.
    """
    own = {id(store) for store in engine.store.parts}
    number = sum(any(id(store) in own for store in other.store.parts) for other in beside)
    if number > 1:
        allowed = "one slipstream.callback() for the tables of a layer: each counts every step"
        raise invalid("callbacks", f"{number} of Slipstream", "fit", allowed)


def require_no_validation(engine: Any) -> None:
    """Raises ValueError if what `apply` returned is read while a `fit` evaluates."""
    if engine.is_validating:
        allowed = (
            "data that did not go through Slipstream.apply: it would leave examples out of them"
        )
        raise invalid("validation_data", "of Slipstream.apply", "fit", allowed)


_OWNERS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def take_over(engine: Any, store: Any) -> None:
    """Makes an engine the one that tracks a store's tables."""
    for part in store.parts:
        _OWNERS[part] = weakref.ref(engine)


def require_owner(engine: Any, store: Any) -> None:
    """Raises ValueError if another engine has been made for a store since."""
    if any(_OWNERS[part]() is not engine for part in store.parts):
        allowed = "the Slipstream that was made last for these tables: both would set what they do"
        raise invalid("slipstream", "one that was made before another", "a step", allowed)


def warn_of_batches_ahead(steps: int, seen: int, batch_size: int, read_size: int) -> None:
    """Warns if the first window has classified more than its steps can have trained.

    Args:
        steps: of the window.
        seen: examples classified in it, none of them skipped.
        batch_size: most examples of a step.
        read_size: most examples that are classified at once.
    """
    # A batch or two may have been looked at before training.
    if seen <= steps * batch_size + 2 * max(batch_size, read_size):
        return
    warnings.warn(
        f"The first window classified {seen:,} examples, but its {steps} steps trained at most "
        f"{steps * batch_size:,}: something fetches batches ahead of training, so that thresholds "
        "take effect late. Put Slipstream.apply last, behind .prefetch.",
        RuntimeWarning,
        stacklevel=5,
    )


def warn_of_more_steps(step: int, planned: int) -> None:
    """Warns that training goes on beyond its plan.

    Args:
        step: that has been trained.
        planned: steps that training was to take, by the number of batches that are read.
    """
    warnings.warn(
        f"Training has taken {step:,} steps, but {planned:,} were planned: the warm-up and the "
        "windows were too short. Batches that are read may be larger than the batch_size that was "
        "given to Slipstream.apply. Make them by `.batch(n)` or `.rebatch(n)`, which tell their "
        "size, or give Window(planned_steps=).",
        RuntimeWarning,
        stacklevel=4,
    )


def warn_without_losses(skips_by_losses: bool) -> None:
    """Warns that a window has ended to which no loss was told, where losses are needed.

    Args:
        skips_by_losses: whether nothing is skipped without them.
    """
    nothing = "nothing is skipped" if skips_by_losses else "what skipping costs is not known"
    warnings.warn(
        "A window has ended, and no step has told its inputs' losses, which the settings need: "
        f"{nothing}. Call `self.record_losses(x, losses, y)` in the train_step of a "
        "slip.keras.Model, or `slipstream.record_losses(x, losses, y)` in a loop of your own.",
        RuntimeWarning,
        stacklevel=5,
    )


def warn_without_steps(batches: int) -> None:
    """Warns that so many batches went through `apply`, and no step was counted."""
    warnings.warn(
        f"{batches} batches went through Slipstream.apply, but no step was counted: no window ends "
        "and nothing is skipped. Give `slipstream.callback()` to model.fit, or call "
        "`slipstream.step()` after each training step.",
        RuntimeWarning,
        stacklevel=3,
    )
