"""Converts frozen dataclasses to JSON dictionaries and back.

Used for optimizers and row initializers.
"""

import dataclasses
from typing import Any, TypeVar

from slipstream_tf._utils.errors import invalid

_T = TypeVar("_T")


class Serializable:
    """A frozen dataclass with the methods that Keras needs to save and load it."""

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary for `from_config`."""
        config: dict[str, Any] = serialize(self)["config"]
        return config

    @classmethod
    def from_config(cls: type[_T], config: dict[str, Any]) -> _T:
        """Creates an object from the dictionary that `get_config` returned."""
        return cls(**config)


def serialize(value: Any) -> dict[str, Any]:
    """Returns {"class_name", "config"} of a frozen dataclass.

    Nested dataclasses are converted too.
    """
    config = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return {"class_name": type(value).__name__, "config": config}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return serialize(value)
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def deserialize(
    argument: str, identifier: Any, classes: tuple[type, ...], module: str, place: str = ""
) -> Any:
    """Returns an instance from itself or from the result of `serialize`.

    Args:
        argument: Name of the argument in the public API, for errors.
        identifier: An instance, or the dictionary of an instance.
        classes: The allowed classes.
        module: The module of `slipstream_tf` that contains the classes, for errors.
        place: Where the value is used, for errors.

    Raises:
        ValueError: The class name is unknown, or the value has another type.
    """
    by_name = {cls.__name__: cls for cls in classes}
    if isinstance(identifier, classes):
        return identifier
    if isinstance(identifier, dict) and identifier.get("class_name") in by_name:
        config = {
            name: deserialize(name, value, classes, module, place)
            if isinstance(value, dict) and value.get("class_name") in by_name
            else value
            for name, value in identifier.get("config", {}).items()
        }
        return by_name[identifier["class_name"]](**config)
    allowed = f"one of slipstream_tf.{module}." + ", ".join(f"{name}(...)" for name in by_name)
    raise invalid(argument, identifier, place, allowed)
