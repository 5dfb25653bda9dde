"""How invalid arguments are reported: the value, the place and what is allowed."""

import math
import numbers
from collections.abc import Sequence
from typing import Any


def invalid(argument: str, value: Any, place: str, allowed: str) -> ValueError:
    """Builds the error for an argument out of its range.

    Args:
        argument: name of the argument as the user wrote it.
        value: what was given.
        place: where, e.g. "table 'user'"; may be empty.
        allowed: what is allowed, e.g. "an integer >= 1".

    Returns:
        A ValueError to raise.
    """
    where = f" for {place}" if place else ""
    return ValueError(f"Invalid `{argument}`: {value!r}{where}. Allowed: {allowed}.")


def require_choice(argument: str, value: Any, choices: Sequence[Any], place: str = "") -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise invalid(argument, value, place, "one of " + ", ".join(repr(c) for c in choices))


def require_integer(
    argument: str, value: Any, minimum: int, maximum: int | None = None, place: str = ""
) -> int:
    """Raises ValueError unless `value` is an integer, NumPy's too, in [minimum, maximum].

    Returns:
        The value as Python's integer.
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
    """Raises ValueError unless `value` is a finite number in range (open: minimum excluded).

    Returns:
        The value as Python's number: NumPy's are numbers, too.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    low_is_met = is_number and (value > minimum if open_minimum else value >= minimum)
    if not is_number or not math.isfinite(value) or not low_is_met or value > maximum:
        parts = ["a finite number"]
        if minimum != -math.inf:
            parts.append(f"{'>' if open_minimum else '>='} {minimum:g}")
        if maximum != math.inf:
            parts.append(f"<= {maximum:g}")
        raise invalid(argument, value, place, " ".join(parts))
    is_plain = isinstance(value, (int, float)) and not hasattr(value, "dtype")
    return value if is_plain else float(value)
