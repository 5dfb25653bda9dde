"""Time that training steps wait for input, with and without `ahead`.

A DLRM of Criteo's shape (13 numbers, 26 keys, the lines of `prepare_rate.py`) trains on batches of
2,048 and skips saturated examples. `Slipstream.apply` reads, hashes, classifies and refills the
batches, with and without `ahead`. The data is text, or the output of `slipstream-prepare`. A custom
loop measures the time of `next(batches)`. The control is a batch in memory. All variants take turns
in one process.

    python benchmarks/input_waits.py --awake --runs=5
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import awake
import keras
import numpy as np
import prepare_rate
import summary
import tensorflow as tf
from absl import app, flags

import slipstream_tf as slip
from slipstream_tf.data.opening import open_source
from slipstream_tf.data.preparation import Options, prepare
from slipstream_tf.data.readers import registry
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.keras import EmbeddingCollection, Slipstream
from slipstream_tf.models import DLRM

# `prepare_rate` defines `--lines`, `--threads`, `--runs` and `--folder`.
_STEPS = flags.DEFINE_integer("steps", 100, "Number of steps per run.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 2048, "Examples per batch.", lower_bound=1)
_WINDOW = flags.DEFINE_integer("window", 50, "Number of steps per window.", lower_bound=1)
_SOURCES = flags.DEFINE_list(
    "sources", ["text", "prepared"], "Sources of the data: text, prepared."
)

_DENSE, _DIM = 13, 16
_BOTTOM, _TOP = (512, 256, 64, _DIM), (512, 256, 1)
_SKIP_SHARE = 0.3
# Number of windows until key states take effect.
_WINDOWS_BEFORE = 3
_QUANTILES = {0.5: "median", 0.95: "95%", 0.99: "99%", 1.0: "longest"}
_WAYS = ("ahead", "on request", "ready")


class Training:
    """A model with batches from one of the variants."""

    def __init__(self, path: str, way: str) -> None:
        """Opens the data and trains until examples are skipped."""
        keras.utils.set_random_seed(0)
        opened = PreparedReader if os.path.isdir(path) else registry.open_data
        train = opened(path, part="train", batch_size=_BATCH.value)
        tables = [slip.Table(field, _DIM) for field in train.spec.fields]
        embeddings = EmbeddingCollection(tables, slip.optimizers.Adagrad(0.01))
        self.model = DLRM(embeddings, _DENSE, _BOTTOM, _TOP, returns_logits=True)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self.model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
        skipping = slip.SkipExamples(slip.RowDrift(), _SKIP_SHARE)
        window = slip.Window(_WINDOW.value, warmup=0)
        self.engine = Slipstream(embeddings, skipping, window)
        dataset = train.dataset().repeat()
        if way == "ready":
            dataset = dataset.rebatch(_BATCH.value, drop_remainder=True).take(1).cache().repeat()
            self.batches: Iterator[Any] = iter(dataset.prefetch(1))
        else:
            ahead = way == "ahead"
            self.batches = iter(self.engine.apply(dataset, _BATCH.value, ahead=ahead))
        self._train = tf.function(
            lambda features, label: self.model.train_step((features, label)), reduce_retracing=True
        )
        for _ in range(_WINDOWS_BEFORE * _WINDOW.value):
            self.step()

    def step(self) -> tuple[float, float]:
        """Trains a step; returns milliseconds of waiting and of the step.

        Both exclude window ends.
        """
        start = time.perf_counter()
        features, label = next(self.batches)
        pulled = time.perf_counter()
        logs = self._train(features, label)
        float(logs["loss"])
        end = time.perf_counter()
        self.engine.step()
        return 1e3 * (pulled - start), 1e3 * (end - start)

    def run(self) -> list[tuple[float, float]]:
        """Trains the steps of a run and returns the times of `step`."""
        return [self.step() for _ in range(_STEPS.value)]


def measure(source: str, path: str) -> list[dict[str, Any]]:
    """Measures the variants on a source, in turns."""
    trainings = {way: Training(path, way) for way in _WAYS}
    steps: dict[str, list[list[tuple[float, float]]]] = {way: [] for way in _WAYS}
    for _ in range(flags.FLAGS.runs):
        for way, training in trainings.items():
            steps[way].append(training.run())
    results = []
    for way, runs in steps.items():
        waits, times = np.array(runs).transpose(2, 0, 1)  # [runs, steps] each
        reports = trainings[way].engine.tracker.reports
        seen = sum(report.examples_seen for report in reports)
        results.append(
            {
                "source": source,
                "variant": way,
                "fraction of time waiting": list(waits.sum(axis=1) / times.sum(axis=1)),
                **{
                    f"wait ms, {name}": float(np.quantile(waits, fraction))
                    for fraction, name in _QUANTILES.items()
                },
                "ms a step": list(times.mean(axis=1)),
                "examples skipped": sum(r.examples_skipped for r in reports) / seen
                if seen
                else 0.0,
            }
        )
    return results


def results_of(results: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
    """Returns the columns and the claims."""
    forms = {"source": "{}", "variant": "{}", "fraction of time waiting": "{:.1%}",
             "ms a step": "{:.1f}", "examples skipped": "{:.1%}"}  # fmt: skip
    columns = [
        summary.column(name, [r[name] for r in results], forms.get(name, "{:.2f}"), "median each")
        for name in results[0]
    ]
    claims = {
        f"{r['source']}_{r['variant'].replace(' ', '_')}": summary.claim(
            r["fraction of time waiting"]
        )
        for r in results
    }
    return {"": columns}, claims


def make_sources(folder: Path) -> dict[str, str]:
    """Writes the lines and prepares them if requested; returns paths by name."""
    text = folder / "lines.tsv"
    if not text.exists():
        prepare_rate.write_lines(text, flags.FLAGS.lines)
    paths = {"text": str(text), "prepared": str(folder / "prepared")}
    if "prepared" in _SOURCES.value:
        source, files = open_source([str(text)])
        options = Options(threads=flags.FLAGS.threads, overwrite=True)
        prepare(source, files, paths["prepared"], options, lambda *_: None)
    return {name: paths[name] for name in _SOURCES.value}


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    unknown = set(_SOURCES.value) - {"text", "prepared"}
    if unknown:
        raise app.UsageError(
            f"Invalid --sources={','.join(_SOURCES.value)}. Expected text, prepared."
        )
    tf.config.threading.set_intra_op_parallelism_threads(flags.FLAGS.threads)
    tf.config.threading.set_inter_op_parallelism_threads(flags.FLAGS.threads)
    awake.keep()
    results: list[dict[str, Any]] = []
    part = f"batches of {_BATCH.value:,}, windows of {_WINDOW.value:,} steps"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(flags.FLAGS.folder or temporary)
        for source, path in make_sources(folder).items():
            print(f"{source} ...", flush=True)
            results += measure(source, path)
            print(summary.write("input_waits", part, *results_of(results)), flush=True)
            keras.backend.clear_session()


if __name__ == "__main__":
    flags.FLAGS.set_default("lines", 200_000)
    flags.FLAGS.set_default("runs", 5)
    app.run(main)
