"""Step time of a watched DLRM compared with plain training.

The model has Criteo's shape: 13 numbers, 26 tables of 100,000 rows x 16, batch 2,048, one Zipf 1.05
key per table. A run is a window of the default length including its end. Both models train in one
process and take turns of a few steps (A B B A ...), because the speed of a busy host changes within
a second. The target ratio is at most 1.02, including 0.005 for the window's end, with memory within
its budgets. With --live, the policy is active: a step that defers gradients should take at most
1.05 times as long as a plain step.

    python benchmarks/watching_cost.py --runs=3 --awake
    python benchmarks/watching_cost.py --runs=3 --awake --live --policies=defer_gradients
    python benchmarks/watching_cost.py --runs=5 --window=100 --policies=row_drift --metrics=l2
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import awake
import common
import keras
import numpy as np
import summary
import tensorflow as tf
from absl import app, flags
from resident import return_free_memory

import slipstream_tf as slip
from slipstream_tf.config import parse_bytes
from slipstream_tf.keras import EmbeddingCollection, Slipstream
from slipstream_tf.models import DLRM
from slipstream_tf.ops import features
from slipstream_tf.policies.base import Policy

# Default window length for long training.
_DEFAULT_WINDOW = slip.Window().length(planned_steps=1_000_000)
_RUNS = flags.DEFINE_integer("runs", 3, "Number of measured windows per model.", lower_bound=1)
_WINDOW = flags.DEFINE_integer(
    "window", _DEFAULT_WINDOW, "Number of steps per window.", lower_bound=1
)
_TURN = flags.DEFINE_integer("turn", 5, "Number of steps per turn.", lower_bound=1)
_BATCHES = flags.DEFINE_integer(
    "batches", 100, "Number of different batches. They are repeated.", lower_bound=1
)
_ROWS = flags.DEFINE_integer("rows", 100_000, "Rows per table.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 2048, "Examples per batch.", lower_bound=1)
_POLICIES = flags.DEFINE_list(
    "policies",
    ["predicted_loss", "row_drift", "mask_gradients", "defer_gradients"],
    "Policies to measure. The first two skip examples.",
)
_METRICS = flags.DEFINE_list(
    "metrics", ["linf"], "Drift metrics to measure with row_drift and mask_gradients."
)
_LIVE = flags.DEFINE_bool(
    "live", False, "Let mask_gradients and defer_gradients act instead of a dry run."
)
_HOT_SET = flags.DEFINE_string("hot_set_memory", "256MiB", "Memory of the row snapshots.")
_DEFERRED = flags.DEFINE_string("defer_memory", "64MiB", "Memory of the deferred gradients.")
_THREADS = flags.DEFINE_integer("threads", 2, "Number of TensorFlow threads.", lower_bound=1)
_QUICK = flags.DEFINE_bool("quick", False, "Trial run of a few seconds with a small model.")

_TABLES, _DENSE, _DIM, _ZIPF = 26, 13, 16, 1.05
_BOTTOM, _TOP = (512, 256, 64, _DIM), (512, 256, 1)
_QUICK_VALUES = {"runs": 2, "window": 12, "batches": 4, "rows": 500, "batch": 64}
# The first window has no snapshot and the second has an incomplete one. States take effect
# afterwards. These windows end after as many steps as there are batches.
_WINDOWS_BEFORE = 3
_MAX_TIMES, _MAX_TIMES_LIVE, _MAX_PART_OF_WINDOW = 1.02, 1.05, 0.005
_BY_DRIFT = ("row_drift", "mask_gradients")
_LEAVE_OUT = ("predicted_loss", "row_drift")


def make_batches() -> tf.data.Dataset:
    """Returns an endless dataset of random batches: ({"keys", "dense"}, label)."""
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
    """Returns a compiled DLRM with all rows of its tables created."""
    keras.utils.set_random_seed(0)
    tables = [slip.Table(f"t{i}", _DIM) for i in range(_TABLES)]
    embeddings = EmbeddingCollection(tables, slip.optimizers.Adagrad(0.01))
    every_key = np.tile(np.arange(_ROWS.value)[:, None], (1, _TABLES))
    specs = embeddings.specs
    embeddings.store.lookup(features.pack(every_key, specs), training=True, stacked=True)
    model = DLRM(embeddings, _DENSE, _BOTTOM, _TOP, returns_logits=True)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    return model


class Arm:
    """One of the two compared models, trained as in `model.fit`."""

    def __init__(
        self, batches: tf.data.Dataset, policy: Policy | None, metric: str | None = None
    ) -> None:
        """Trains the model until key states take effect.

        With policy None, it is the plain side.
        """
        self.model = make_model()
        self.slipstream, callbacks = None, []
        if policy is not None:
            self.slipstream = Slipstream(
                self.model.embeddings,
                policy,
                slip.Window(_WINDOW.value, warmup=0),
                slip.HotSet(_HOT_SET.value),
                dry_run=not _LIVE.value,
                saturation=None if metric is None else slip.Saturation(metric),
            )
            callbacks = [self.slipstream.callback()]
        # Creates the variables that the train function requires.
        self.model.train_on_batch(*next(iter(batches)))
        self.model.make_train_function()
        self._callbacks = keras.callbacks.CallbackList(callbacks, model=self.model, epochs=1)
        self._callbacks.on_train_begin()
        self._callbacks.on_epoch_begin(0)
        # Prefetch, as `apply` does.
        applied = batches.prefetch(1) if self.slipstream is None else self.slipstream.apply(batches)
        self._batches, self._step = iter(applied), 0
        for _ in range(_WINDOWS_BEFORE):
            self.turn(min(_BATCHES.value, _WINDOW.value - 1))
            if self.slipstream is not None:
                self.slipstream.end_window()

    def turn(self, steps: int) -> tuple[float, float]:
        """Trains some steps; a window that becomes full during them ends.

        Returns:
            Wall time and processor time in milliseconds.
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
    """Trains a window on each side in turns; the order alternates.

    Returns:
        float64 [sides, turns, 2], wall time and processor time of each turn in milliseconds.
    """
    turns: list[list[tuple[float, float]]] = [[] for _ in arms]
    order = list(range(len(arms)))
    for first in range(0, _WINDOW.value, _TURN.value):
        for side in order:
            turns[side].append(arms[side].turn(min(_TURN.value, _WINDOW.value - first)))
        order.reverse()
    return np.array(turns)


def policies() -> dict[str, Policy]:
    """Returns the policies that can be measured, by name."""
    return {
        "predicted_loss": slip.SkipExamples(slip.PredictedLoss("fm")),
        "row_drift": slip.SkipExamples(slip.RowDrift()),
        "mask_gradients": slip.MaskGradients(),
        "defer_gradients": slip.DeferGradients(memory=_DEFERRED.value),
    }


def measure(policy: str, metric: str | None, batches: tf.data.Dataset) -> dict[str, Any]:
    """Measures a policy and metric compared with plain training."""
    start = return_free_memory()
    plain = Arm(batches, None)
    between = return_free_memory()
    watched = Arm(batches, policies()[policy], metric)
    end = return_free_memory()
    assert watched.slipstream is not None
    windows_before = len(watched.slipstream.tracker.reports)
    runs = [run_window((plain, watched)) for _ in range(_RUNS.value)]
    reports = watched.slipstream.tracker.reports[windows_before:]
    assert len(reports) == len(runs)
    ends = [1e3 * report.seconds for report in reports]
    totals = np.array([run.sum(axis=1) for run in runs])  # [runs, arms, 2]
    ratios, processor_ratios = (totals[:, 1] / totals[:, 0]).T
    without_ends = [(run[1] - end) / run[0] for run, end in zip(totals[:, :, 0], ends, strict=True)]
    saved = statistics.median(ends) * (1 / _WINDOW.value - 1 / _DEFAULT_WINDOW)
    saved /= totals[:, 0, 0].mean() / _WINDOW.value
    return {
        "policy": policy,
        "metric": metric or "none",
        "milliseconds": totals[:, :, 0].T / _WINDOW.value,
        "ratios": list(ratios),
        "standard_error": standard_error(runs, ends),
        "processor_ratios": list(processor_ratios),
        "ratios_without_ends": without_ends,
        "window_end_milliseconds": ends,
        # The ratio for windows of the default length.
        "ratios_at_default_window": list(ratios - saved),
        "hot_keys": reports[-1].hot_keys,
        "snapshot_bytes": max(report.snapshot_bytes for report in reports),
        "snapshot_budget_bytes": parse_bytes("hot_set_memory", _HOT_SET.value),
        "held_bytes": max(sum(t.rows.deferred_bytes for t in r.tables) for r in reports),
        "held_budget_bytes": parse_bytes("defer_memory", _DEFERRED.value),
        "process_bytes": None
        if start is None or between is None or end is None
        else (end - between) - (between - start),
    }


def standard_error(runs: Sequence[np.ndarray], ends: Sequence[float]) -> float:
    """Returns the ratio's standard error from differences of paired turns."""
    pairs = [run[:, :, 0].copy() for run in runs]
    for run, end in zip(pairs, ends, strict=True):
        run[1, -1] -= end  # The window's end is part of the last turn, and is not noise.
    plain, watched = np.concatenate(pairs, axis=1)
    differences = watched - plain * (watched.sum() / plain.sum())
    return float(np.std(differences) / np.sqrt(len(plain)) / plain.mean())


def tables_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the tables of times and memory."""

    def of(name: str, figure: str, form: str, show: str = "", unit: float = 1.0) -> dict[str, Any]:
        found = [result[figure] for result in results]
        if unit != 1.0:
            found = [None if value is None else value / unit for value in found]
        return summary.column(name, found, form, show)

    ways = [of("policy", "policy", "{}"), of("metric", "metric", "{}")]
    sides = zip(*(result["milliseconds"] for result in results), strict=True)
    times = [
        summary.column(f"{side} ms", [list(ms) for ms in found], "{:.2f}", "mean")
        for side, found in zip(("plain", "watched"), sides, strict=True)
    ]
    return {
        "Time of a step": [
            *ways, *times, of("watched / plain", "ratios", "{:.3f}", "median each"),
            of("± of all windows", "standard_error", "{:.3f}"),
            of("of processor time", "processor_ratios", "{:.3f}", "median"),
            of("without window ends", "ratios_without_ends", "{:.3f}", "median"),
            of("window end, ms", "window_end_milliseconds", "{:.0f}"),
        ],
        "Memory, MiB": [
            *ways, of("hot keys", "hot_keys", "{:,}"),
            of("snapshots", "snapshot_bytes", "{:.1f}", "", 2**20),
            of("snapshot budget", "snapshot_budget_bytes", "{:.1f}", "", 2**20),
            of("deferred gradients", "held_bytes", "{:.1f}", "", 2**20),
            of("deferral budget", "held_budget_bytes", "{:.1f}", "", 2**20),
            of("process", "process_bytes", "{:.0f}", "", 2**20),
        ],
    }  # fmt: skip


def claims_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the claims: ratios at windows of the default length, and budgets."""
    claims = {}
    for result in results:
        name = f"{result['policy']}_{result['metric']}".removesuffix("_none")
        name = f"live_{name}" if _LIVE.value else name
        maximum = _MAX_TIMES_LIVE if _LIVE.value else _MAX_TIMES
        claims[name] = summary.claim(result["ratios_at_default_window"], maximum)
        window = _DEFAULT_WINDOW * result["milliseconds"][0].mean()
        ends = [end / window for end in result["window_end_milliseconds"]]
        claims[f"{name}_end"] = summary.claim(ends, _MAX_PART_OF_WINDOW)
        shares = [
            result[f"{what}_bytes"] / result[f"{what}_budget_bytes"]
            for what in ("snapshot", "held")
        ]
        claims[f"{name}_fraction_of_budget"] = summary.claim([max(shares)], 1.0)
    return claims


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    for name in _POLICIES.value:
        if name not in policies():
            raise app.UsageError(f"Invalid --policies: {name!r}. Expected {', '.join(policies())}.")
        if _LIVE.value and name in _LEAVE_OUT:
            raise app.UsageError(
                f"Invalid --policies: {name!r} with --live. Expected policies that drop no example."
            )
    if _QUICK.value:
        for name, value in _QUICK_VALUES.items():
            if not flags.FLAGS[name].present:
                setattr(flags.FLAGS, name, value)
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    tf.config.threading.set_inter_op_parallelism_threads(_THREADS.value)
    batches = make_batches()
    awake.keep()
    # Do not charge TensorFlow's one-time memory to the first measured side.
    Arm(batches, None)
    results: list[dict[str, Any]] = []
    part = f"windows of {_WINDOW.value:,} steps, {_ROWS.value:,} rows a table"
    part = f"{part}, live" if _LIVE.value else part
    for policy in _POLICIES.value:
        for metric in _METRICS.value if policy in _BY_DRIFT else (None,):
            print(f"policy={policy}, metric={metric} ...", flush=True)
            results.append(measure(policy, metric, batches))
            # Write after each result, so that an interrupted benchmark keeps its results.
            tables, claims = tables_of(results), claims_of(results)
            print(summary.write("watching_cost", part, tables, claims), flush=True)
            # Release the models, so that only two exist at a time.
            keras.backend.clear_session()
            gc.collect()


if __name__ == "__main__":
    app.run(main)
