"""Fraction of accesses to the hottest rows, for real and generated data.

    python benchmarks/hot_share.py

The method's paper states that a hot part of 500 MB receives three quarters of the accesses to
tables of gigabytes. Accesses are counted in hindsight on the training part, so no other selection
of rows receives more. A row has 16 float32 values. The optimizer's slots are not counted, as in the
paper.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import common
import numpy as np
import summary
import tensorflow as tf
from absl import app, flags

from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.readers.registry import open_data
from slipstream_tf.data.spec import Reader

_DATA = flags.DEFINE_list(
    "data",
    [
        "globo",
        "frappe",
        "criteo_first10k.tsv",
        "avazu_first9k.csv",
        "generated:2000000:1000000",
        "generated:4000000:20000000",
    ],
    "Data to measure: files, names of data sets that are prepared first, and generated data.",
)
_ROW_BYTES, _HOT_BYTES, _AT_ONCE = 16 * 4, 500_000_000, 1 << 14
_SHARES = (1, 5, 10, 25, 50)


def counts_of(data: str) -> np.ndarray:
    """Returns the accesses per key in the training part, descending."""
    if data in common.DATASETS:
        reader: Reader = PreparedReader(common.prepared(data)["data"], _AT_ONCE, "train")
    else:
        is_file = not data.startswith("generated")
        reader = open_data(common.in_data_folder(data) if is_file else data, "train", _AT_ONCE)
    fields: list[list[np.ndarray]] = []
    for features, *_ in reader.dataset().prefetch(2):
        keys = features["keys"]
        parts = tf.nest.flatten(keys) if isinstance(keys, dict) else tf.unstack(keys, axis=1)
        fields = fields or [[] for _ in parts]
        for field, part in zip(fields, parts, strict=True):
            field.append(part.numpy().ravel())
    found = [np.unique(np.concatenate(field), return_counts=True)[1] for field in fields]
    return np.sort(np.concatenate(found))[::-1]


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    names, sizes, hot, accesses = [], [], [], []
    shares: dict[int, list[float]] = {fraction: [] for fraction in _SHARES}
    for data in _DATA.value:
        counts = counts_of(data)
        total = counts.sum()
        names.append(os.path.basename(data))
        sizes.append(counts.size * _ROW_BYTES / 1e6)
        accesses.append(int(total))
        hot.append(100 * counts[: _HOT_BYTES // _ROW_BYTES].sum() / total)
        for fraction, values in shares.items():
            values.append(100 * counts[: max(1, counts.size * fraction // 100)].sum() / total)
    columns = [
        summary.column("data", names),
        summary.column("accesses", accesses, "{:,}"),
        summary.column("rows of 16, MB", sizes, "{:,.1f}"),
        summary.column("served by the hottest 500 MB", hot, "{:.1f}%"),
        *(
            summary.column(f"{fraction}% of the rows", values, "{:.1f}%")
            for fraction, values in shares.items()
        ),
    ]
    print(summary.write("hot_share", "Hottest rows", {"": columns}, {}), flush=True)


if __name__ == "__main__":
    app.run(main)
