"""Nested dictionaries of numbers, words and arrays as JSON and a flat list of arrays, and back."""

import json
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

    def stand_in(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"array-{len(arrays)}"
            arrays[name] = value
            return {_ARRAY: name}
        return value.item() if isinstance(value, np.generic) else dict(value)

    return json.loads(json.dumps(tree, default=stand_in)), arrays


def unflatten(skeleton: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Puts the arrays back.

    Raises:
        KeyError: an array is missing.
    """

    def put_back(value: dict[str, Any]) -> Any:
        return arrays[value[_ARRAY]] if set(value) == {_ARRAY} else value

    return json.loads(json.dumps(skeleton), object_hook=put_back)
