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
        allowed = "one slipstream.callback() per table, because each callback counts every step"
        raise invalid("callbacks", f"{number} Slipstream callbacks", "fit", allowed)
    inside = {id(layer) for layer in layers_in(model)}
    for layer in engine.layers:
        if id(layer) not in inside:
            place = f"Slipstream in fit of model {model.name!r}"
            allowed = (
                "a layer of this model. A loaded or cloned model has new layers: create a new "
                "Slipstream for them"
            )
            raise invalid("embeddings", layer.name, place, allowed)
    if isinstance(model, LossFeedback):
        return
    names = ("train_step", "compute_loss")
    # A custom step can call `Slipstream.record_losses`.
    is_plain = all(getattr(type(model), name) is getattr(keras.Model, name) for name in names)
    if engine.settings.needs_losses and is_plain:
        allowed = (
            "a model that records the loss of each example, which max_auc_loss and "
            "DryRun(estimates_cost=True) require. Use slip.keras.Model(inputs, outputs), "
            "slip.keras.Sequential, or a class derived from slip.keras.Model"
        )
        name = f"{type(model).__name__} {model.name!r}"
        raise invalid("model", name, "fit with Slipstream", allowed)
    place = f"fit of {type(model).__name__}, which is not a slip.keras.Model"
    if engine.settings.examples.correction == "offset":
        allowed = "'weight', or a slip.keras.Model, because a plain model ignores the offset"
        raise invalid("correction", "offset", place, allowed)
    if engine.settings.subsamples_in_step:
        allowed = "'fm', 'linear' or 'label', or a slip.keras.Model, which subsamples its batches"
        raise invalid("pilot", "model", place, allowed)


def warn_at_window_end(engine: Any, report: Any) -> None:
    """Warns about mistakes that are visible at the end of a window.

    Args:
        engine: A `Slipstream`.
        report: The report of the window.
    """
    if engine.settings.policies and engine.plan.is_exceeded_by(report.step):
        _warn(
            f"Training has taken {report.step:,} steps, but only {engine.plan.steps:,} steps were "
            "planned. Therefore the warm-up and the windows were too short. The batches of the "
            "dataset may be larger than the `batch_size` of Slipstream.apply. Create them with "
            "`.batch(n)` or `.rebatch(n)`, so that their size is known, or pass "
            "Window(planned_steps=...)."
        )
    if report.window > 0:
        return
    if engine.settings.needs_losses and not engine.are_losses_recorded:
        is_bound = engine.settings.max_auc_loss is not None
        result = "nothing is skipped" if is_bound else "the report has no cost of skipping"
        _warn(
            "A window has ended, but no step has recorded losses, which the settings require. "
            f"Therefore {result}. Call `self.record_losses(x, losses, y)` in the train_step of a "
            "slip.keras.Model, or `slipstream.record_losses(x, losses, y)` in a custom loop."
        )
    if engine.settings.subsamples_in_step and not report.examples_seen:
        _warn(
            "A window has ended, but no example was subsampled, because pilot='model' is set and "
            "train_step does not call `slipstream.subsample(batch, predictions)`. Add this call, "
            "or use another pilot."
        )
    (trained, read), steps = engine.batch_sizes, report.step
    if engine.comm.size > 1 or not trained or not read or report.examples_skipped:
        return
    # `Slipstream.apply` itself classifies up to two batches before they are trained.
    if report.examples_seen > steps * trained + 2 * max(trained, read):
        _warn(
            f"The first window classified {report.examples_seen:,} examples, but its {steps} steps "
            f"trained at most {steps * trained:,}. The pipeline fetches batches ahead of training, "
            "so that thresholds take effect late. Call Slipstream.apply last, after .prefetch."
        )


def warn_without_steps(engine: Any, batches: int) -> None:
    """Warns if `apply` returned batches but the engine counted no step.

    Args:
        engine: A `Slipstream`.
        batches: Number of batches that `apply` has returned, for the message.
    """
    if engine.steps == 0 and not engine.tracker.reports:
        _warn(
            f"{batches} batches passed through Slipstream.apply, but no step was counted. "
            "Therefore no window ends and the policies have no effect. Pass "
            "`slipstream.callback()` to model.fit, or call `slipstream.step()` after each step."
        )


def _warn(message: str) -> None:
    # Attributes the warning to the caller of the `Slipstream` method.
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def require_no_validation(engine: Any) -> None:
    """Raises ValueError if a result of `apply` is read during validation.

    It is called when an iteration over such a result begins.
    """
    if engine.is_validating:
        allowed = "a dataset without Slipstream.apply, which would drop examples"
        raise invalid("validation_data", "a result of Slipstream.apply", "fit", allowed)


_OWNERS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def claim_store(engine: Any, store: Any) -> None:
    """Registers an engine as the only tracker of a store's tables.

    An engine that tracked them before is replaced; see `require_owner`.
    """
    for part in store.parts:
        _OWNERS[part] = weakref.ref(engine)


def require_owner(engine: Any, store: Any) -> None:
    """Raises ValueError if a later engine tracks tables of the store."""
    if any(_OWNERS[part]() is not engine for part in store.parts):
        place = f"a step of the tables {[table.name for table in store.tables]}"
        allowed = "the Slipstream that was created last for these tables, which replaced this one"
        raise invalid("slipstream", "a replaced Slipstream", place, allowed)
