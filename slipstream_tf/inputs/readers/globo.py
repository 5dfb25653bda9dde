"""The globo task: clicks on news articles, each beside one article that was not clicked.

Positives are the clicks in the file's order (by time). The negative of click i is a copy of it
with the article of click i - r, r uniform in [1, 20000] floored at click 0. Two splits:

- "random": rows made from the first 1.5 million clicks, 90% for training and 10% for testing by a
  random permutation (seed 0); both parts keep the order of time.
- "time": the first 90% of the clicks for training, the last 10% for testing; almost half of the
  test articles are new.
"""

import functools
import os
from typing import Any

import numpy as np

from slipstream_tf.errors import require_choice, require_integer
from slipstream_tf.inputs.readers.arrays import ArrayReader, read_arrays, require_integers
from slipstream_tf.inputs.spec import PARTS, DataSpec

FIELDS = (
    *("user", "article", "environment", "device", "os", "country", "region", "referrer"),
    *("hour", "session_size"),
)
SPLITS = ("random", "time")
RANDOM_SPLIT_CLICKS = 1_500_000
TRAIN_SHARE = 0.9
FARTHEST_NEGATIVE = 20_000
LARGEST_SESSION = 20
_COLUMNS = (*FIELDS[:8], "click_ts", "session_size")


def build_rows(columns: dict[str, np.ndarray], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes positives and negatives.

    Args:
        columns: the clicks' columns by name, [clicks] each.
        seed: of the negatives.

    Returns:
        keys int32 [2 * clicks, 10] and label int8 [2 * clicks]; click i gives rows 2i (label 1)
        and 2i + 1 (label 0).
    """
    clicks = len(columns["article"])
    farness = np.random.default_rng(seed).integers(1, FARTHEST_NEGATIVE + 1, clicks)
    negative = columns["article"][np.maximum(np.arange(clicks) - farness, 0)]
    keys = np.empty((clicks, 2, len(FIELDS)), np.int32)
    for column, field in enumerate(FIELDS):
        if field == "hour":
            values = columns["click_ts"] // 3600 % 24
        elif field == "session_size":
            values = np.minimum(columns[field], LARGEST_SESSION)
        else:
            values = columns[field]
        keys[:, :, column] = values[:, None]
    keys[:, 1, FIELDS.index("article")] = negative
    label = np.tile(np.array([1, 0], np.int8), clicks)
    return keys.reshape(-1, len(FIELDS)), label


@functools.lru_cache(maxsize=1)
def _task(path: str, modified: int, split: str, seed: int) -> dict[str, tuple[Any, Any]]:
    """Both parts; kept until the file is modified: a training run opens one after the other."""
    columns = read_arrays(path, _COLUMNS, RANDOM_SPLIT_CLICKS if split == "random" else None)
    require_integers(path, columns, 32)
    if len({values.shape for values in columns.values()}) > 1 or columns["user"].ndim != 1:
        shapes = {name: values.shape for name, values in columns.items()}
        raise ValueError(f"{path}: columns of shapes {shapes}; allowed: all of one [clicks].")
    keys, label = build_rows(columns, seed)
    if split == "time":
        first = 2 * int(len(label) // 2 * TRAIN_SHARE)
        return {"train": (keys[:first], label[:first]), "test": (keys[first:], label[first:])}
    is_train = np.zeros(len(label), bool)
    chosen = np.random.default_rng(seed).permutation(len(label))[: int(len(label) * TRAIN_SHARE)]
    is_train[chosen] = True
    parts = {"train": is_train, "test": ~is_train}
    return {part: (keys[is_in], label[is_in]) for part, is_in in parts.items()}


class GloboReader(ArrayReader):
    """Reads one part of the globo task."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        part: str = "train",
        split: str = "random",
        seed: int = 0,
        shuffle_seed: int | None = None,
        max_examples: int | None = None,
        **options: Any,
    ):
        """Builds the task, once for both parts.

        Args:
            path: the .npz file of clicks.
            batch_size: inputs of a batch.
            part: "train" or "test".
            split: "random" or "time".
            seed: of negatives and of the random split; the task as specified has seed 0.
            shuffle_seed: see `ArrayReader`; None trains in the order of time.
            max_examples: keep so many inputs from the start of the part, or None for all.
            **options: of `ArrayReader`.

        Raises:
            ValueError: an argument is unknown, or the file is damaged or has not the columns of
                clicks.
        """
        require_choice("part", part, PARTS, "globo")
        require_choice("split", split, SPLITS, "globo")
        require_integer("seed", seed, 0, None, "globo")
        if max_examples is not None:
            require_integer("max_examples", max_examples, 1, None, "globo")
        path = os.path.abspath(path)
        keys, label = _task(path, os.stat(path).st_mtime_ns, split, seed)[part]
        keys, label = keys[:max_examples], label[:max_examples]
        spec = DataSpec("globo", FIELDS, num_examples=len(label))
        super().__init__(spec, keys, label, batch_size, shuffle_seed=shuffle_seed, **options)
