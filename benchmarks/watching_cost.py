"""What it costs to watch: a DLRM in shadow mode (all but the skipping) beside the same one, plain.

Criteo's shape: 13 numbers, 26 tables of 100,000 rows x 16, batch 2,048, one Zipf 1.05 key per
table. A run is a window of the default length with its end. Both models train in one process and
take turns of a few steps (A B B A ...), as a busy host's speed changes within a second. Asked: at
most 1.02, and memory within its budgets. Writes watching_cost.json and .md.

    python benchmarks/watching_cost.py --runs=3 --awake
    python benchmarks/watching_cost.py --runs=5 --window=100 --skips=inputs --metrics=linf
"""

from __future__ import annotations

import gc
import os
import statistics
import time
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

_DEFAULT_WINDOW = slip.SaturationConfig().snapshot_interval
_RUNS = flags.DEFINE_integer("runs", 3, "Measured windows of each model.", lower_bound=1)
_WINDOW = flags.DEFINE_integer("window", _DEFAULT_WINDOW, "Steps of a window.", lower_bound=1)
_TURN = flags.DEFINE_integer("turn", 5, "Steps of a turn.", lower_bound=1)
_BATCHES = flags.DEFINE_integer("batches", 100, "Batches, which repeat.", lower_bound=1)
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
_QUICK_VALUES = {"runs": 2, "window": 12, "batches": 4, "rows": 500, "batch": 64}
# The first window has no snapshot and the second none of a full one: states are in force after.
# They end after as many steps as there are batches.
_WINDOWS_BEFORE = 3
_MOST_TIMES = 1.02


def make_batches() -> tf.data.Dataset:
    """Random inputs in memory, again and again: ({"keys", "dense"}, label)."""
    rng = np.random.default_rng(0)
    shape = (_BATCHES.value, _BATCH.value)
    parts = (
        {
            "keys": common.zipf_keys(rng, _ROWS.value, (*shape, _TABLES), _ZIPF),
            "dense": rng.normal(size=(*shape, _DENSE)).astype(np.float32),
        },
        (rng.random(shape) < 0.25).astype(np.float32),
    )
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensor_slices(parts).repeat().with_options(options)


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
    """One of the two sides: a model in training, as `model.fit` has it train."""

    def __init__(self, batches: tf.data.Dataset, skip: str | None, metric: str = "linf") -> None:
        """Trains the model until states are in force; skip None is the plain side."""
        self.model = make_model()
        self.slipstream, callbacks = None, []
        if skip is not None:
            config = slip.SaturationConfig(
                skip=skip, metric=metric, shadow=True, warmup_steps=0,
                snapshot_interval=_WINDOW.value,
                hot_budget_bytes=round(_HOT_BUDGET.value * 2**20),
                defer_budget_bytes=round(_DEFER_BUDGET.value * 2**20),
            )  # fmt: skip
            self.slipstream = Slipstream(self.model.embeddings, config)
            callbacks = [self.slipstream.callback()]
        # It makes what the train function must find.
        self.model.train_on_batch(*next(iter(batches)))
        self.model.make_train_function()
        self._callbacks = keras.callbacks.CallbackList(callbacks, model=self.model, epochs=1)
        self._callbacks.on_train_begin()
        self._callbacks.on_epoch_begin(0)
        # Ready before they are pulled, as those that `apply` makes.
        applied = batches.prefetch(1) if self.slipstream is None else self.slipstream.apply(batches)
        self._batches, self._step = iter(applied), 0
        for _ in range(_WINDOWS_BEFORE):
            self.turn(min(_BATCHES.value, _WINDOW.value - 1))
            if self.slipstream is not None:
                self.slipstream.end_window()

    def turn(self, steps: int) -> tuple[float, float]:
        """Trains some steps; a window that gets full in them ends.

        Returns:
            Milliseconds, and milliseconds of processors.
        """
        start, processors_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._callbacks.on_train_batch_begin(self._step)
            logs = self.model.train_function(self._batches)
            self._callbacks.on_train_batch_end(self._step, logs)
            self._step += 1
        wall, processors = time.perf_counter() - start, time.process_time() - processors_start
        return 1e3 * wall, 1e3 * processors


def run_window(arms: Sequence[Arm]) -> np.ndarray:
    """Trains a window of each side, in turns; the first of a pair of turns goes second in the next.

    Returns:
        Milliseconds, float64 [sides, turns, 2]: of each turn, and of processors in it.
    """
    turns: list[list[tuple[float, float]]] = [[] for _ in arms]
    order = list(range(len(arms)))
    for first in range(0, _WINDOW.value, _TURN.value):
        for side in order:
            turns[side].append(arms[side].turn(min(_TURN.value, _WINDOW.value - first)))
        order.reverse()
    return np.array(turns)


def measure(skip: str, metric: str, batches: tf.data.Dataset) -> dict[str, Any]:
    """Measures one way of watching beside plain training."""
    start = return_free_memory()
    plain = Arm(batches, None)
    between = return_free_memory()
    watched = Arm(batches, skip, metric)
    end = return_free_memory()
    assert watched.slipstream is not None
    windows_before = len(watched.slipstream.tracker.reports)
    runs = [run_window((plain, watched)) for _ in range(_RUNS.value)]
    reports = watched.slipstream.tracker.reports[windows_before:]
    assert len(reports) == len(runs)
    ends = [1e3 * report.seconds for report in reports]
    totals = np.array([run.sum(axis=1) for run in runs])  # [runs, sides, 2]
    ratios, processor_ratios = (totals[:, 1] / totals[:, 0]).T
    without_ends = [(run[1] - end) / run[0] for run, end in zip(totals[:, :, 0], ends, strict=True)]
    per_step = totals.mean(axis=0) / _WINDOW.value  # [sides, 2]
    # As if all turns were of a window that is as long as the default one.
    saved = statistics.median(ends) * (1 / _WINDOW.value - 1 / _DEFAULT_WINDOW) / per_step[0, 0]
    at_default = statistics.median(ratios) - saved
    held = max(sum(t.rows.pending_bytes for t in r.tables) for r in reports)
    snapshots = max(report.snapshot_bytes for report in reports)
    config = watched.slipstream.config
    return {
        "skip": skip,
        "metric": metric,
        "milliseconds_per_step": dict(zip(("plain", "watched"), per_step[:, 0], strict=True)),
        "ratio": statistics.median(ratios),
        "ratios": list(ratios),
        "standard_error": standard_error(runs, ends),
        "processor_ratio": statistics.median(processor_ratios),
        "processor_ratios": list(processor_ratios),
        "ratio_without_ends": statistics.median(without_ends),
        "window_end_milliseconds": ends,
        "turns": [
            {"plain": run[0, :, 0].round(2).tolist(), "watched": run[1, :, 0].round(2).tolist()}
            for run in runs
        ],
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


def standard_error(runs: Sequence[np.ndarray], ends: Sequence[float]) -> float:
    """Standard error of the ratio of all runs, by the differences of the pairs of turns."""
    pairs = [run[:, :, 0].copy() for run in runs]
    for run, end in zip(pairs, ends, strict=True):
        run[1, -1] -= end  # It is in the last turn, and no noise.
    plain, watched = np.concatenate(pairs, axis=1)
    differences = watched - plain * (watched.sum() / plain.sum())
    return float(np.std(differences) / np.sqrt(len(plain)) / plain.mean())


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Returns the table."""
    header = (
        *("skip", "metric", "plain ms", "watched ms", "ratio", "± of all runs", "ratios of runs"),
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
            f"{result['milliseconds_per_step']['plain']:.2f}",
            f"{result['milliseconds_per_step']['watched']:.2f}",
            f"{result['ratio']:.3f}",
            f"{result['standard_error']:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in result["ratios"]),
            f"{result['processor_ratio']:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in result["processor_ratios"]),
            f"{result['ratio_without_ends']:.3f}",
            " ".join(f"{end:.0f}" for end in result["window_end_milliseconds"]),
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
    batches = make_batches()
    is_awake = awake.keep()
    # What TensorFlow takes once must not count for the first side that is measured.
    Arm(batches, None)
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
    chosen = ("runs", "window", "turn", "batches", "rows", "batch", "threads", "quick")
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
