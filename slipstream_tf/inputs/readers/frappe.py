"""Frappe_x1 of the BARS benchmark (app usage in contexts) from an .npz file: 10 fields, 3 parts."""

import os
from typing import Any

from slipstream_tf.errors import require_choice
from slipstream_tf.inputs.readers import arrays
from slipstream_tf.inputs.spec import PARTS, DataSpec

FIELDS = (
    *("user", "item", "daytime", "weekday", "isweekend"),
    *("homework", "cost", "weather", "country", "city"),
)


class FrappeReader(arrays.ArrayReader):
    """Reads one part of Frappe_x1. Keys are the file's ids, which differ between fields."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        part: str = "train",
        shuffle_seed: int | None = None,
        **options: Any,
    ):
        """Loads the part.

        Args:
            path: an .npz file with arrays {train,valid,test}_{x,y}.
            batch_size: inputs of a batch.
            part: "train", "valid" or "test".
            shuffle_seed: see `ArrayReader`; the file's order is by label, so shuffle for training.
            **options: of `ArrayReader`.

        Raises:
            ValueError: the part is unknown, or the file is damaged or has not its arrays.
        """
        require_choice("part", part, PARTS, "Frappe")
        name, names = os.fspath(path), (f"{part}_x", f"{part}_y")
        keys, label = arrays.read_arrays(name, names).values()
        arrays.require_integers(name, {names[0]: keys}, 64)
        what = f"{name}: {names[1]!r}"
        if label.dtype.kind not in "biuf":
            raise ValueError(f"{what} is of type {label.dtype}; allowed: numbers.")
        arrays.require_all(what, label, (label == 0) | (label == 1), "0 or 1")
        spec = DataSpec("frappe", FIELDS, num_examples=len(label))
        super().__init__(spec, keys, label, batch_size, shuffle_seed=shuffle_seed, **options)
