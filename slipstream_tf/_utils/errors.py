"""Errors for invalid arguments, with place and allowed values."""

import itertools
import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any

MAX_SHOWN = 80


def shown(value: Any) -> str:
    """Returns a value as text for an error, with at most `MAX_SHOWN` characters.

    An array or tensor is described by dtype and shape. The middle of a long text is omitted, which
    keeps the start and the end of a path.
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and shape != ():
        text = f"{getattr(dtype, 'name', dtype)} {type(value).__name__} of shape {shape}"
    else:
        text = _short.repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    head = (MAX_SHOWN - 3) // 2
    return f"{text[:head]}...{text[head + 3 - MAX_SHOWN :]}"


class _ShortRepr(reprlib.Repr):
    """A `repr` that does not print all elements of a large collection."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        for name in ("maxtuple", "maxlist", "maxarray", "maxset", "maxfrozenset"):
            setattr(self, name, MAX_SHOWN)
        self.maxstring = self.maxlong = self.maxother = 2 * MAX_SHOWN

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # The base class sorts the keys.
        first = itertools.islice(x.items(), MAX_SHOWN if level > 0 else 0)
        parts = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in first]
        return "{" + ", ".join(parts + ["..."] * (len(parts) < len(x))) + "}"


_short = _ShortRepr()


def invalid(argument: str, value: Any, place: str, allowed: str) -> ValueError:
    """Returns a ValueError for an argument with an invalid value.

    Args:
        argument: Name of the argument in the public API.
        value: The given value, printed as by `shown`.
        place: Where the value is used, for example "table 'user'". May be empty.
        allowed: Description of the allowed values, for example "an integer >= 1".

    Returns:
        The ValueError, to be raised by the caller.
    """
    where = f" for {place}" if place else ""
    return ValueError(f"Invalid `{argument}`: {shown(value)}{where}. Expected {allowed}.")


def require_choice(argument: str, value: Any, choices: Sequence[Any], place: str = "") -> None:
    """Raises ValueError unless `value` is one of `choices`.

    The other arguments are described in `invalid`.
    """
    if value not in choices:
        raise invalid(argument, value, place, "one of " + ", ".join(repr(c) for c in choices))


def require_integer(
    argument: str, value: Any, minimum: int, maximum: int | None = None, place: str = ""
) -> int:
    """Raises ValueError unless `value` is an integer in [minimum, maximum].

    NumPy integers are accepted, bools are not. A maximum of None means no upper bound. The other
    arguments are described in `invalid`.

    Returns:
        The value as a Python int.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):
        bound = f"an integer >= {minimum}"
        if maximum is not None:
            bound += f" and <= {maximum}"
        raise invalid(argument, value, place, bound)
    return int(value)


def require_number(
    argument: str,
    value: Any,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    place: str = "",
    open_minimum: bool = False,
) -> float:
    """Raises ValueError unless `value` is a finite number in range.

    NumPy numbers are accepted, bools are not. The bounds are included, except for the minimum with
    `open_minimum`. The other arguments are described in `invalid`.

    Returns:
        The value as a Python number.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    low_is_met = is_number and (value > minimum if open_minimum else value >= minimum)
    if not is_number or not math.isfinite(value) or not low_is_met or value > maximum:
        bounds = []
        if minimum != -math.inf:
            bounds.append(f" {'>' if open_minimum else '>='} {minimum:g}")
        if maximum != math.inf:
            bounds.append(f" <= {maximum:g}")
        raise invalid(argument, value, place, "a finite number" + " and".join(bounds))
    is_plain = isinstance(value, (int, float)) and not hasattr(value, "dtype")
    return value if is_plain else float(value)
