"""Prepares clicks on news articles (globo) and sampled negatives for slipstream-train.

    python benchmarks/datasets/globo.py globo_clicks.npz --output=prepared/globo --negatives=9

The positives are the clicks in the order of the file, which is sorted by time. A negative of a
click has the same features and the article of another click. With --negatives_from=before, a
negative of click i has the article of click max(i - r, 0), with r uniform in [1, 20000]. With
--negatives_from=hour, it has the article of any click of the same hour, which is harder to
distinguish from the positive. There are two splits:

- random: uses the first clicks, enough for 3 million examples unless --clicks is given. A random
  permutation assigns 90% of the examples to training and 10% to testing.
- time: trains on the first 90% of the clicks and tests on the last 10%. Almost half of the test
  articles do not occur in training.

The examples of each part stay in time order. With --hold_out, a tenth of the training part becomes
the validation part: chosen by the same permutation, or the last tenth of the training clicks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import preparing

from slipstream_tf.cli.flag_set import Choice, Flag, Integer

FIELDS = (
    *("user", "article", "environment", "device", "os", "country", "region", "referrer"),
    *("hour", "session_size"),
)
_COLUMNS = (*FIELDS[:8], "click_ts", "session_size")
_RANDOM_SPLIT_ROWS = 3_000_000
_TRAIN_SHARE = 0.9
_FARTHEST_NEGATIVE = 20_000
_LARGEST_SESSION = 20

FLAGS = (
    Flag("split", Choice(("random", "time")), "split of the clicks; with time, the test part is "
         "later than training", "random"),
    Flag("negatives", Integer(1, 1000), "examples without a click for each click", 1),
    Flag("negatives_from", Choice(("before", "hour")), "source of a negative's article: one of the "
         "20,000 clicks before, or a click of the same hour, which is harder to distinguish",
         "before"),
    Flag("clicks", Integer(1), "number of clicks to use, from the start of the file", None,
         "enough for 3 million examples; all for --split=time"),
    Flag("hold_out", None, "move a tenth of the training part to a validation part"),
    Flag("seed", Integer(0), "seed of the negatives and of the random split", 0),
)  # fmt: skip


def build_examples(
    columns: Mapping[str, np.ndarray], seed: int, negatives: int, negatives_from: str
) -> tuple[np.ndarray, np.ndarray]:
    """Combines each click with its negatives.

    Args:
        columns: Columns of the clicks by name, each of shape [clicks].
        seed: Seed for drawing the negatives.
        negatives: Number of negatives per click.
        negatives_from: `"before"` or `"hour"`, see the module docstring.

    Returns:
        Keys, int32 [clicks * (1 + negatives), 10], and labels, int8 [clicks * (1 + negatives)].
        Each click gives one example with label 1, followed by its negatives.
    """
    clicks = len(columns["article"])
    random, shape = np.random.default_rng(seed), (clicks, negatives)
    if negatives_from == "before":
        distance = random.integers(1, _FARTHEST_NEGATIVE + 1, shape)
        other = np.maximum(np.arange(clicks)[:, None] - distance, 0)
    else:
        hour = columns["click_ts"] // 3600
        first, end = (np.searchsorted(hour, hour, side) for side in ("left", "right"))
        other = first[:, None] + (random.random(shape) * (end - first)[:, None]).astype(np.int64)
    keys = np.empty((clicks, 1 + negatives, len(FIELDS)), np.int32)
    for column, field in enumerate(FIELDS):
        if field == "hour":
            values = columns["click_ts"] // 3600 % 24
        elif field == "session_size":
            values = np.minimum(columns[field], _LARGEST_SESSION)
        else:
            values = columns[field]
        keys[:, :, column] = values[:, None]
    keys[:, 1:, FIELDS.index("article")] = columns["article"][other]
    labels = np.tile(np.array([1] + [0] * negatives, np.int8), clicks)
    return keys.reshape(-1, len(FIELDS)), labels


def read(
    path: str,
    split: str,
    negatives: int,
    negatives_from: str,
    clicks: int | None,
    hold_out: bool,
    seed: int,
) -> preparing.PartsSource:
    """Reads the clicks and builds the examples of all parts.

    Args:
        path: Path of the .npz file.
        split, negatives, negatives_from, clicks, hold_out, seed: Values of `FLAGS`.

    Returns:
        The examples of all parts.

    Raises:
        OSError: The file cannot be read.
        ValueError: A column is missing, or has an invalid shape or invalid values.
    """
    per_click = 1 + negatives
    limit = clicks
    if split == "random" and limit is None:
        limit = -(-_RANDOM_SPLIT_ROWS // per_click)
    columns = {n: values[:limit] for n, values in preparing.read_arrays(path, _COLUMNS).items()}
    preparing.require_integers(path, columns, 32)
    shapes = {name: values.shape for name, values in columns.items()}
    if len(set(shapes.values())) > 1 or columns["user"].ndim != 1:
        raise ValueError(f"{path}: Invalid shapes: {shapes}. Expected [clicks] for all arrays.")
    keys, labels = build_examples(columns, seed, negatives, negatives_from)
    unit = per_click if split == "time" else 1
    test = unit * int(len(labels) // unit * _TRAIN_SHARE)
    valid = unit * int(test // unit * _TRAIN_SHARE) if hold_out else test
    part_of = np.repeat([0, 1, 2], [valid, test - valid, len(labels) - test])
    if split == "random":
        order = np.random.default_rng(seed).permutation(len(labels))
        part_of[order] = part_of.copy()
    names = ("train", "valid", "test") if hold_out else ("train", None, "test")
    parts = {
        name: (keys[part_of == part], labels[part_of == part])
        for part, name in enumerate(names)
        if name is not None
    }
    settings = {
        "split": split, "negatives": negatives, "negatives_from": negatives_from, "clicks": clicks,
        "hold_out": hold_out, "seed": seed,
    }  # fmt: skip
    return preparing.PartsSource("globo", path, FIELDS, parts, settings)


if __name__ == "__main__":
    preparing.entry_point(
        "globo.py",
        "Prepares clicks on news articles, each next to articles that were not clicked.",
        "globo_clicks.npz",
        FLAGS,
        read,
    )
