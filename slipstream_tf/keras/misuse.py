"""What goes wrong where an engine, a model and a `fit` are put together, in a sentence each.

In: the parts. Out: errors before the first step, and warnings while it runs.
"""

import warnings
from typing import Any

import keras

from slipstream_tf.errors import invalid
from slipstream_tf.keras.loss_feedback import LossFeedback


def require_losses(model: Any) -> None:
    """Raises ValueError if a model cannot tell its inputs' losses."""
    names = ("train_step", "compute_loss")
    # A step of its own may call `Slipstream.record_losses`.
    is_plain = all(getattr(type(model), name) is getattr(keras.Model, name) for name in names)
    if not is_plain or isinstance(model, LossFeedback):
        return
    allowed = (
        "slip.keras.Model(inputs, outputs), slip.keras.Sequential, or a class derived from "
        "slip.keras.Model: these settings need each input's loss (remembered losses, guard, budget "
        "or estimate of cost), which a plain Keras model does not tell"
    )
    name = f"{type(model).__name__} {model.name!r}"
    raise invalid("model", name, "fit with Slipstream", allowed)


def warn_without_losses(nothing: str) -> None:
    """Warns that a window has ended to which no loss was told, where losses are needed.

    Args:
        nothing: what does not happen without them.
    """
    warnings.warn(
        "A window has ended, and no step has told its inputs' losses, which the settings need: "
        f"{nothing}. Call `self.record_losses(x, losses, y)` in the train_step of a "
        "slip.keras.Model, or `slipstream.record_losses(x, losses, y)` in a loop of your own.",
        RuntimeWarning,
        stacklevel=3,
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
