"""Keras models whose training tells the engine each input's loss.

In: what `keras.Model` and `keras.Sequential` take. Out: the same models, with `LossFeedback`.
"""

from typing import Any

import keras

from slipstream_tf import _compat
from slipstream_tf.keras.loss_feedback import LossFeedback


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
