"""A seeded generator of inputs shaped like Criteo's: 13 numbers, 26 fields, skewed keys, clicks.

It is for trying the programs where there is no data. Its labels follow a made-up law, so its AUC
says nothing about real clicks.
"""

from __future__ import annotations

import numpy as np

from slipstream_tf.cli.array_reader import ArrayReader
from slipstream_tf.inputs.spec import DataSpec

NUM_DENSE = 13
# Keys per field: a few large fields, many small ones, as in Criteo's.
CARDINALITIES = (
    1400, 550, 60_000, 40_000, 300, 20, 12_000, 600, 3, 40_000, 5000, 60_000, 3000,
    26, 10_000, 50_000, 10, 4500, 2000, 4, 60_000, 17, 15, 30_000, 90, 20_000,
)  # fmt: skip
_SKEW = 6.0  # The 1% most popular keys of a field take about 46% of its inputs.
_TEST_SHARE = 0.1
_TASTES = 4  # Latent values per key, whose products make pairs of fields matter.


def generate(
    count: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws inputs.

    Args:
        count: how many.
        seed: the same seed gives the same inputs.

    Returns:
        keys int64 [count, 26]; dense float32 [count, 13]; labels float32 [count], about a quarter
        of them 1.
    """
    # The law of the clicks is drawn apart from the inputs, so that it is the same for any count.
    law, generator = np.random.default_rng(seed).spawn(2)
    fields = len(CARDINALITIES)
    keys = np.empty((count, fields), np.int64)
    logit = np.zeros(count)
    tastes = np.zeros((count, _TASTES))
    for field, cardinality in enumerate(CARDINALITIES):
        popularity = generator.random(count) ** _SKEW
        keys[:, field] = np.minimum(popularity * cardinality, cardinality - 1).astype(np.int64)
        logit += law.normal(0.0, 0.25, cardinality)[keys[:, field]]
        taste = law.normal(0.0, 0.35, (cardinality, _TASTES))[keys[:, field]]
        logit += (tastes * taste).sum(axis=1)
        tastes = 0.7 * tastes + taste
    dense = generator.normal(0.0, 1.0, (count, NUM_DENSE))
    logit += dense @ law.normal(0.0, 0.15, NUM_DENSE) - 1.4
    labels = generator.random(count) < 1.0 / (1.0 + np.exp(-logit))
    return keys, dense.astype(np.float32), labels.astype(np.float32)


def open_generated(count: int, part: str, batch_size: int, seed: int) -> ArrayReader:
    """Opens a part of generated inputs.

    Args:
        count: inputs of both parts together, 10 or more; the last tenth is the test part.
        part: "train" or "test".
        batch_size: inputs per batch.
        seed: of the training part's order; the inputs themselves are always the same.

    Returns:
        The reader.
    """
    keys, dense, labels = generate(count)
    border = count - int(count * _TEST_SHARE)
    rows = slice(0, border) if part == "train" else slice(border, None)
    names = tuple(f"c{field + 1}" for field in range(len(CARDINALITIES)))
    spec = DataSpec("generated", names, NUM_DENSE, len(labels[rows]))
    shuffle_seed = seed if part == "train" else None
    return ArrayReader(spec, keys[rows], dense[rows], labels[rows], batch_size, shuffle_seed)
