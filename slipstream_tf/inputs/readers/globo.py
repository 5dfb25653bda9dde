"""The globo task: clicks on news articles, each beside articles that were not clicked.

Positives are the clicks in the file's order (by time). A negative of click i is a copy of it with
the article of another click. By the law "before" that is click i - r, r uniform in [1, 20000]
floored at click 0; by the law "hour" it is any click of the same hour, which is harder to tell. Two
splits:

- "random": rows made from the first clicks, some 3 million rows unless told otherwise; 90% for
  training and 10% for testing by a random permutation (seed 0); all parts keep the order of time.
  Validation: a tenth of the training part, by the same permutation.
- "time": the first 90% of the clicks for training, the last tenth of which is for validation, the
  last 10% for testing; almost half of the test articles are new.
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
RANDOM_SPLIT_ROWS = 3_000_000
LAWS = ("before", "hour")
TRAIN_SHARE = 0.9
FARTHEST_NEGATIVE = 20_000
LARGEST_SESSION = 20
_COLUMNS = (*FIELDS[:8], "click_ts", "session_size")


def build_rows(
    columns: dict[str, np.ndarray], seed: int, negatives: int = 1, law: str = "before"
) -> tuple[np.ndarray, np.ndarray]:
    """Makes positives and negatives.

    Args:
        columns: the clicks' columns by name, [clicks] each.
        seed: of the negatives.
        negatives: of each click.
        law: which other clicks' articles they have: "before" or "hour".

    Returns:
        keys int32 [clicks * (1 + negatives), 10] and label int8 [clicks * (1 + negatives)]: of each
        click one row of label 1, then those of label 0.
    """
    clicks = len(columns["article"])
    random, shape = np.random.default_rng(seed), (clicks, negatives)
    if law == "before":
        farness = random.integers(1, FARTHEST_NEGATIVE + 1, shape)
        other = np.maximum(np.arange(clicks)[:, None] - farness, 0)
    else:
        hour = columns["click_ts"] // 3600
        first, end = (np.searchsorted(hour, hour, side) for side in ("left", "right"))
        other = first[:, None] + (random.random(shape) * (end - first)[:, None]).astype(np.int64)
    keys = np.empty((clicks, 1 + negatives, len(FIELDS)), np.int32)
    for column, field in enumerate(FIELDS):
        if field == "hour":
            values = columns["click_ts"] // 3600 % 24
        elif field == "session_size":
            values = np.minimum(columns[field], LARGEST_SESSION)
        else:
            values = columns[field]
        keys[:, :, column] = values[:, None]
    keys[:, 1:, FIELDS.index("article")] = columns["article"][other]
    label = np.tile(np.array([1] + [0] * negatives, np.int8), clicks)
    return keys.reshape(-1, len(FIELDS)), label


@functools.lru_cache(maxsize=1)
def _task(
    path: str, modified: int, split: str, seed: int, negatives: int, law: str, clicks: int | None
) -> dict[str, tuple[Any, Any]]:
    """All parts; kept until the file is modified: a training run opens one after the other.

    "train" is the training part without "valid", and "all" the one with it.
    """
    per_click = 1 + negatives
    limit = clicks
    if split == "random" and limit is None:
        limit = -(-RANDOM_SPLIT_ROWS // per_click)
    columns = read_arrays(path, _COLUMNS, limit)
    require_integers(path, columns, 32)
    if len({values.shape for values in columns.values()}) > 1 or columns["user"].ndim != 1:
        shapes = {name: values.shape for name, values in columns.items()}
        raise ValueError(f"{path}: columns of shapes {shapes}; allowed: all of one [clicks].")
    keys, label = build_rows(columns, seed, negatives, law)
    if split == "time":
        test = per_click * int(len(label) // per_click * TRAIN_SHARE)
        valid = per_click * int(test // per_click * TRAIN_SHARE)
        ends = {"train": (0, valid), "valid": (valid, test), "all": (0, test), "test": (test, None)}
        return {part: (keys[slice(*end)], label[slice(*end)]) for part, end in ends.items()}
    order = np.random.default_rng(seed).permutation(len(label))
    test = int(len(label) * TRAIN_SHARE)
    valid = int(test * TRAIN_SHARE)
    ends = {"train": (0, valid), "valid": (valid, test), "all": (0, test), "test": (test, None)}
    parts = {}
    for part, end in ends.items():
        is_in = np.zeros(len(label), bool)
        is_in[order[slice(*end)]] = True
        parts[part] = keys[is_in], label[is_in]
    return parts


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
        negatives: int = 1,
        law: str = "before",
        hold_out: bool = False,
        max_examples: int | None = None,
        clicks: int | None = None,
        **options: Any,
    ):
        """Builds the task, once for all parts.

        Args:
            path: the .npz file of clicks.
            batch_size: inputs of a batch.
            part: "train", "valid" or "test".
            split: "random" or "time".
            seed: of negatives and of the random split; the task as specified has seed 0.
            shuffle_seed: see `ArrayReader`; None trains in the order of time.
            negatives: of each click, 1 to 1000.
            law: of the negatives: "before" or "hour".
            hold_out: whether "valid" is left out of "train".
            max_examples: keep so many inputs from the start of the part, or None for all.
            clicks: the first ones, of which the parts are made; None: those that give the random
                split its rows, or all in order of time.
            **options: of `ArrayReader`.

        Raises:
            ValueError: an argument is unknown, or the file is damaged or has not the columns of
                clicks.
        """
        require_choice("part", part, PARTS, "globo")
        require_choice("split", split, SPLITS, "globo")
        require_integer("seed", seed, 0, None, "globo")
        require_integer("negatives", negatives, 1, 1000, "globo")
        require_choice("law", law, LAWS, "globo")
        if max_examples is not None:
            require_integer("max_examples", max_examples, 1, None, "globo")
        if clicks is not None:
            require_integer("clicks", clicks, 1, None, "globo")
        path = os.path.abspath(path)
        parts = _task(path, os.stat(path).st_mtime_ns, split, seed, negatives, law, clicks)
        keys, label = parts["all" if part == "train" and not hold_out else part]
        keys, label = keys[:max_examples], label[:max_examples]
        spec = DataSpec("globo", FIELDS, num_examples=len(label))
        super().__init__(spec, keys, label, batch_size, shuffle_seed=shuffle_seed, **options)
