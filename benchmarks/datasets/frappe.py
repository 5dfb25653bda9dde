"""Prepares Frappe_x1 of the BARS benchmark (app usage in contexts) for slipstream-train.

    python benchmarks/datasets/frappe.py frappe_x1.npz --output=prepared/frappe

The data set has 10 fields and a train, a valid and a test part. The ids of the file become the
keys. Note: the file is sorted by label, therefore train with --shuffle=examples.
"""

from __future__ import annotations

import numpy as np
import preparing

FIELDS = (
    *("user", "item", "daytime", "weekday", "isweekend"),
    *("homework", "cost", "weather", "country", "city"),
)
_PARTS = ("train", "valid", "test")


def read(path: str) -> preparing.PartsSource:
    """Reads the train, valid and test parts.

    Args:
        path: Path of an .npz file with the arrays {train,valid,test}_{x,y}.

    Returns:
        The examples of the three parts.

    Raises:
        OSError: The file cannot be read.
        ValueError: An array is missing, or has an invalid shape or invalid values.
    """
    names = [f"{part}_{kind}" for part in _PARTS for kind in "xy"]
    arrays = preparing.read_arrays(path, names)
    parts = {}
    for part in _PARTS:
        keys, labels = arrays[f"{part}_x"], arrays[f"{part}_y"]
        preparing.require_integers(path, {f"{part}_x": keys}, 64)
        if keys.shape != (len(labels), len(FIELDS)) or labels.ndim != 1:
            raise ValueError(
                f"{path}: Invalid shapes of the part {part!r}: {keys.shape} and {labels.shape}. "
                f"Expected [n, {len(FIELDS)}] and [n]."
            )
        if not np.isin(labels, (0, 1)).all():
            raise ValueError(f"{path}: Invalid labels in '{part}_y'. Expected 0 or 1.")
        parts[part] = keys, labels
    return preparing.PartsSource("frappe", path, FIELDS, parts, {})


if __name__ == "__main__":
    preparing.entry_point(
        "frappe.py", "Prepares Frappe_x1 of the BARS benchmark.", "frappe_x1.npz", (), read
    )
