"""Prepares Frappe_x1 of the BARS benchmark (app usage in contexts): 10 fields, 3 parts.

    python benchmarks/datasets/frappe.py frappe_x1.npz --output=prepared/frappe

Keys are the file's ids. The file's order is by label: train with --shuffle=examples.
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
    """Reads all parts.

    Args:
        path: of an .npz file with arrays {train,valid,test}_{x,y}.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not have these arrays.
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
