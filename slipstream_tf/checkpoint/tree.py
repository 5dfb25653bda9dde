"""Nested dictionaries of numbers, words and arrays as JSON and a flat list of arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# A value of this one key stands for an array, the name of which it gives.
_ARRAY = "__array__"


def flatten(tree: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Takes the arrays out of a tree.

    Args:
        tree: dictionaries with names for keys, lists, and leaves: JSON-serialisable values or
            arrays of at least one dimension.

    Returns:
        The tree with a reference for each array, JSON-serialisable; and the arrays by name.
    """
    arrays: dict[str, np.ndarray] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"array-{len(arrays)}"
            arrays[name] = value
            return {_ARRAY: name}
        if isinstance(value, Mapping):
            return {str(key): walk(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(part) for part in value]
        if isinstance(value, np.generic):
            return value.item()
        return value

    return walk(tree), arrays


def unflatten(skeleton: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Puts the arrays back.

    Raises:
        KeyError: an array is missing.
    """
    if isinstance(skeleton, dict):
        if set(skeleton) == {_ARRAY}:
            return arrays[skeleton[_ARRAY]]
        return {key: unflatten(part, arrays) for key, part in skeleton.items()}
    if isinstance(skeleton, list):
        return [unflatten(part, arrays) for part in skeleton]
    return skeleton
