"""Errors for invalid arguments, with place and allowed values."""

import math
import numbers
from collections.abc import Sequence
from typing import Any


def invalid(argument: str, value: Any, place: str, allowed: str) -> ValueError:
    """Returns a ValueError for an argument with an invalid value.

    Args:
        argument: Name of the argument in the public API.
        value: The given value.
        place: Where the value is used, for example "table 'user'". May be empty.
        allowed: Description of the allowed values, for example "an integer >= 1".

    Returns:
        The ValueError, to be raised by the caller.
    """
    where = f" for {place}" if place else ""
    return ValueError(f"Invalid `{argument}`: {value!r}{where}. Expected {allowed}.")


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
