"""Milliseconds of one embedding step of the native store: lookup, gradient sum, update.

26 tables of 100,000 rows x 16, batch 2,048, one Zipf key per table, TensorFlow's default threads.
One store per rule, measured in turn (A B A B ...); prints every run and the median, writes JSON.

    python benchmarks/embedding_step.py --runs=5 --output=embedding_step.json
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

import slipstream_tf as slip
from slipstream_tf.ops import features
from slipstream_tf.stores import NativeStore

_RUNS = flags.DEFINE_integer("runs", 5, "Measured runs of each rule.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 50, "Steps of a run.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 100_000, "Rows of a table.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 16, "Values of a row.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 2048, "Inputs of a batch.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

_TABLES = 26
_ZIPF = 1.05
_RULES = (
    slip.optimizers.SGD(0.01),
    slip.optimizers.Adagrad(0.01),
    slip.optimizers.RowWiseAdagrad(0.01),
    slip.optimizers.Adam(0.01),
)


def draw_keys(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Keys 0 .. rows - 1 with probability proportional to 1 / (key + 1)^1.05."""
    weights = 1.0 / np.arange(1, _ROWS.value + 1) ** _ZIPF
    edges = np.cumsum(weights / weights.sum())
    return np.minimum(np.searchsorted(edges, rng.random(shape)), _ROWS.value - 1)


def make_step(rule: Any) -> Any:
    """Builds a full store and returns a function of one step over a batch of keys."""
    names = [f"t{i}" for i in range(_TABLES)]
    specs = [features.FeatureSpec(name, name) for name in names]
    store = NativeStore([slip.TableConfig(name, _DIM.value) for name in names], rule)
    every_key = np.tile(np.arange(_ROWS.value)[:, None], (1, _TABLES))
    store.lookup(features.pack(every_key, specs), specs, training=True, stacked=True)
    gradient = tf.random.stateless_normal([_BATCH.value, _TABLES, _DIM.value], [0, 0])

    @tf.function
    def step(keys: tf.Tensor) -> None:
        rows, plan = store.lookup(features.pack(keys, specs), specs, training=True, stacked=True)
        with tf.control_dependencies(rows):
            store.apply_gradients(plan, [gradient])

    return step


def main(_: Sequence[str]) -> None:
    """Measures and prints."""
    rng = np.random.default_rng(0)
    batches = [tf.constant(k) for k in draw_keys(rng, (_STEPS.value, _BATCH.value, _TABLES))]
    steps = {rule.rule: make_step(rule) for rule in _RULES}
    for step in steps.values():
        step(batches[0])
    milliseconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_RUNS.value):
        for name, step in steps.items():
            start = time.perf_counter()
            for keys in batches:
                step(keys)
            seconds = time.perf_counter() - start
            milliseconds[name].append(1e3 * seconds / len(batches))
    print(f"{'rule':<16} {'median ms':>9}  runs")
    for name, runs in milliseconds.items():
        print(f"{name:<16} {statistics.median(runs):>9.2f}  {' '.join(f'{r:.2f}' for r in runs)}")
    if _OUTPUT.value:
        record = {
            "milliseconds": milliseconds,
            "settings": {"tables": _TABLES, "rows": _ROWS.value, "dim": _DIM.value,
                         "batch": _BATCH.value, "steps": _STEPS.value, "zipf": _ZIPF},
            "threads": tf.config.threading.get_intra_op_parallelism_threads() or "default",
            "machine": platform.processor() or platform.machine(),
            "versions": {"tensorflow": tf.__version__, "slipstream_tf": slip.__version__},
        }  # fmt: skip
        with open(_OUTPUT.value, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    app.run(main)
