"""Frozen dataclasses as dictionaries for JSON, and back: of optimizers and row initializers."""

import dataclasses
from typing import Any

from slipstream_tf._utils.errors import invalid


def serialize(value: Any) -> dict[str, Any]:
    """Returns {"class_name", "config"} of a frozen dataclass; what is in it in the same form."""
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
    """Returns an instance of one of some classes, from itself or from what `serialize` made.

    Args:
        argument: as the user wrote it, for the error.
        identifier: an instance, or the dictionary of one.
        classes: that are allowed.
        module: of `slipstream_tf`, that they are in.
        place: where, for the error.

    Raises:
        ValueError: the name is unknown or the value is of another type.
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
    allowed = f"slipstream_tf.{module}." + ", ".join(f"{name}(...)" for name in by_name)
    raise invalid(argument, identifier, place, allowed)
