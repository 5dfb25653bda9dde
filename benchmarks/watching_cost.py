"""What it costs to watch: a DLRM in shadow mode (all but the skipping) beside the same one, plain.

Criteo's shape: 13 numbers, 26 tables of 100,000 rows x 16, batch 2,048, one Zipf 1.05 key per
table. A measured run is `model.fit` over whole windows, ends included; both models take turns in
one process (A B A B ...), and what counts is the ratio within a turn. Asked: at most 1.02 with the
default window, its end included, and memory within its budgets. Writes watching_cost.json and .md.

    python benchmarks/watching_cost.py --runs=5
    python benchmarks/watching_cost.py --runs=5 --window=1000 --windows=1 --skips=inputs
"""

from __future__ import annotations

import gc
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import awake
import common
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from resident import return_free_memory

import slipstream_tf as slip
from slipstream_tf.keras import EmbeddingCollection, Slipstream
from slipstream_tf.models import DLRM
from slipstream_tf.ops import features
from slipstream_tf.telemetry.run_record import machine, versions, write_json

_RUNS = flags.DEFINE_integer("runs", 5, "Measured runs of each model.", lower_bound=1)
_WINDOW = flags.DEFINE_integer("window", 100, "Steps of a window.", lower_bound=1)
_WINDOWS = flags.DEFINE_integer("windows", 2, "Windows of a run.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 100_000, "Rows of a table.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 2048, "Inputs of a batch.", lower_bound=1)
_SKIPS = flags.DEFINE_list("skips", ["inputs", "gradients", "defer"], "Skip modes to watch with.")
_METRICS = flags.DEFINE_list("metrics", ["linf", "signal"], "Drift metrics to watch with.")
_HOT_BUDGET = flags.DEFINE_float("hot_budget_mb", 256.0, "MiB of snapshots.", lower_bound=1e-3)
_DEFER_BUDGET = flags.DEFINE_float("defer_budget_mb", 64.0, "MiB of held sums.", lower_bound=1e-3)
_THREADS = flags.DEFINE_integer("threads", 2, "Threads of TensorFlow.", lower_bound=1)
_QUICK = flags.DEFINE_bool("quick", False, "A small model for seconds: shows that it runs.")
_OUTPUT = flags.DEFINE_string("output", "results", "Folder of the JSON and the table.")

_TABLES, _DENSE, _DIM, _ZIPF = 26, 13, 16, 1.05
_BOTTOM, _TOP = (512, 256, 64, _DIM), (512, 256, 1)
_QUICK_VALUES = {"runs": 2, "window": 4, "rows": 500, "batch": 64, "windows": 1}
# The first window has no snapshot and the second none of a full one: states are in force after.
_WINDOWS_BEFORE = 3
_MOST_TIMES = 1.02
_DEFAULT_WINDOW = slip.SaturationConfig().snapshot_interval


def make_batches(count: int) -> tf.data.Dataset:
    """Random inputs in memory: ({"keys", "dense"}, label), `count` batches."""
    rng = np.random.default_rng(0)
    shape = (count, _BATCH.value)
    parts = (
        {
            "keys": common.zipf_keys(rng, _ROWS.value, (*shape, _TABLES), _ZIPF),
            "dense": rng.normal(size=(*shape, _DENSE)).astype(np.float32),
        },
        (rng.random(shape) < 0.25).astype(np.float32),
    )
    options = tf.data.Options()
    # Its tuner makes a turn of `fit` last 10 + 20 + 40 + ... ms, whatever the steps take.
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensor_slices(parts).with_options(options)


def make_model() -> Any:
    """A compiled DLRM whose tables have all their rows."""
    keras.utils.set_random_seed(0)
    tables = [slip.TableConfig(f"t{i}", _DIM) for i in range(_TABLES)]
    embeddings = EmbeddingCollection(tables, slip.optimizers.Adagrad(0.01))
    every_key = np.tile(np.arange(_ROWS.value)[:, None], (1, _TABLES))
    specs = embeddings.specs
    embeddings.store.lookup(features.pack(every_key, specs), specs, training=True, stacked=True)
    model = DLRM(embeddings, _DENSE, _BOTTOM, _TOP, returns_logits=True)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    return model


class Arm:
    """One of the two sides: a model and its data."""

    def __init__(self, batches: tf.data.Dataset, skip: str | None, metric: str = "linf") -> None:
        """Makes the model; skip None is the plain side."""
        self.model = make_model()
        # Ready before they are pulled, as those that `apply` makes.
        self.batches, self.slipstream, self.callbacks = batches.prefetch(1), None, []
        if skip is not None:
            config = slip.SaturationConfig(
                skip=skip, metric=metric, shadow=True, warmup_steps=0,
                snapshot_interval=_WINDOW.value,
                hot_budget_bytes=round(_HOT_BUDGET.value * 2**20),
                defer_budget_bytes=round(_DEFER_BUDGET.value * 2**20),
            )  # fmt: skip
            self.slipstream = Slipstream(self.model.embeddings, config)
            self.batches = self.slipstream.apply(batches, batch_size=_BATCH.value)
            self.callbacks = [self.slipstream.callback()]

    def run(self) -> tuple[float, float]:
        """Trains over all batches.

        Returns:
            Milliseconds per step, window ends included, and those of processors.
        """
        start, processors_start = time.perf_counter(), time.process_time()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            self.model.fit(self.batches, verbose=0, shuffle=False, callbacks=self.callbacks)
        seconds = time.perf_counter() - start, time.process_time() - processors_start
        wall, processors = (1e3 * s / (_WINDOW.value * _WINDOWS.value) for s in seconds)
        return wall, processors


def warm_arm(batches: tf.data.Dataset, skip: str | None, metric: str = "linf") -> Arm:
    """Makes one of the sides and trains it until states are in force."""
    arm = Arm(batches, skip, metric)
    for _ in range(-(-_WINDOWS_BEFORE // _WINDOWS.value)):
        arm.run()
    return arm


def measure(skip: str, metric: str, batches: tf.data.Dataset) -> dict[str, Any]:
    """Measures one way of watching beside plain training."""
    start = return_free_memory()
    plain = warm_arm(batches, None)
    between = return_free_memory()
    watched = warm_arm(batches, skip, metric)
    end = return_free_memory()
    assert watched.slipstream is not None
    windows_before = len(watched.slipstream.tracker.reports)
    arms = {"plain": plain, "watched": watched}
    milliseconds: dict[str, list[float]] = {name: [] for name in arms}
    of_processors: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(_RUNS.value):
        for name, arm in arms.items():
            wall, processors = arm.run()
            milliseconds[name].append(wall)
            of_processors[name].append(processors)
    reports = watched.slipstream.tracker.reports[windows_before:]
    steps = len(reports) * _WINDOW.value
    ends = 1e3 * sum(report.seconds for report in reports)
    medians = {name: statistics.median(runs) for name, runs in milliseconds.items()}
    ratios, processor_ratios = (
        [a / b for a, b in zip(times["watched"], times["plain"], strict=True)]
        for times in (milliseconds, of_processors)
    )
    # Ends are as many in every window, however many steps it has; pair by pair they are not known.
    saved = (ends / steps - ends / len(reports) / _DEFAULT_WINDOW) / medians["plain"]
    at_default = statistics.median(ratios) - saved
    held = max(sum(t.rows.pending_bytes for t in r.tables) for r in reports)
    snapshots = max(report.snapshot_bytes for report in reports)
    config = watched.slipstream.config
    return {
        "skip": skip,
        "metric": metric,
        "milliseconds_per_step": milliseconds,
        "medians": medians,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "processor_milliseconds_per_step": of_processors,
        "processor_ratio": statistics.median(processor_ratios),
        "processor_ratios": processor_ratios,
        "ratio_without_ends": statistics.median(ratios) - ends / steps / medians["plain"],
        "window_end_milliseconds": ends / len(reports),
        "ratio_at_default_window": at_default,
        "asked": _MOST_TIMES,
        "reached": at_default <= _MOST_TIMES,
        "windows": len(reports),
        "hot_keys": reports[-1].hot_keys,
        "saturated_share": reports[-1].saturated_share,
        "snapshot_bytes": snapshots,
        "snapshot_budget_bytes": config.hot_budget_bytes,
        "held_bytes": held,
        "held_budget_bytes": config.defer_budget_bytes,
        "within_budgets": snapshots <= config.hot_budget_bytes
        and held <= config.defer_budget_bytes,
        "process_bytes": None
        if start is None or between is None or end is None
        else (end - between) - (between - start),
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Returns the table."""
    header = (
        *("skip", "metric", "plain ms", "watched ms", "ratio", "ratios of runs"),
        *("processors' ratio", "of runs"),
        *("without ends", "a window end, ms", f"at {_DEFAULT_WINDOW:,} steps a window"),
        *("asked", "reached", "hot keys", "snapshots MiB", "of", "held MiB", "of"),
        *("within", "process MiB"),
    )
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for result in results:
        mebibytes = [
            f"{result[name] / 2**20:.1f}"
            for name in (
                *("snapshot_bytes", "snapshot_budget_bytes"),
                *("held_bytes", "held_budget_bytes"),
            )
        ]
        cells = (
            result["skip"],
            result["metric"],
            f"{result['medians']['plain']:.2f}",
            f"{result['medians']['watched']:.2f}",
            f"{result['ratio']:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in result["ratios"]),
            f"{result['processor_ratio']:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in result["processor_ratios"]),
            f"{result['ratio_without_ends']:.3f}",
            f"{result['window_end_milliseconds']:.0f}",
            f"{result['ratio_at_default_window']:.3f}",
            f"{result['asked']:.2f}",
            "yes" if result["reached"] else "**no**",
            f"{result['hot_keys']:,}",
            *mebibytes,
            "yes" if result["within_budgets"] else "**no**",
            "n/a" if result["process_bytes"] is None else f"{result['process_bytes'] / 2**20:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measures, prints and writes."""
    if len(arguments) > 1:
        raise app.UsageError(f"{arguments[1]!r} is no flag. Allowed: --flag=value.")
    if _QUICK.value:
        for name, value in _QUICK_VALUES.items():
            if not flags.FLAGS[name].present:
                setattr(flags.FLAGS, name, value)
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    tf.config.threading.set_inter_op_parallelism_threads(_THREADS.value)
    batches = make_batches(_WINDOW.value * _WINDOWS.value)
    is_awake = awake.keep()
    # What TensorFlow takes once must not count for the first side that is measured.
    Arm(batches, None).run()
    results = []
    for skip in _SKIPS.value:
        for metric in _METRICS.value:
            print(f"skip={skip}, metric={metric} ...", flush=True)
            results.append(measure(skip, metric, batches))
            print(markdown(results[-1:]), flush=True)
            # A measurement that is stopped leaves what it has measured.
            write(results, is_awake)
            # Two models are held at a time, not all of them.
            keras.backend.clear_session()
            gc.collect()
    print(markdown(results))


def write(results: Sequence[dict[str, Any]], is_awake: bool) -> None:
    """Writes watching_cost.json and .md."""
    output = Path(_OUTPUT.value)
    chosen = ("runs", "window", "windows", "rows", "batch", "threads", "quick")
    settings = {name: flags.FLAGS[name].value for name in chosen}
    write_json(
        str(output / "watching_cost.json"),
        {
            "results": results,
            "settings": {**settings, "tables": _TABLES, "dense": _DENSE, "dim": _DIM,
                         "bottom": _BOTTOM, "top": _TOP, "zipf": _ZIPF},
            "awake": is_awake,
            "machine": machine(),
            "versions": versions(),
        },
    )  # fmt: skip
    title = "# Cost of watching (shadow mode), per step, window ends included"
    (output / "watching_cost.md").write_text(f"{title}\n\n{markdown(results)}\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
