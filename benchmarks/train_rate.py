"""Examples per second of slipstream-train, beside bare steps and `model.fit` on data in memory.

slipstream-train reads, measures, tells its progress and traces its graphs in the time that counts.
Bare steps are the model's forward and backward pass and its updates on batches in memory, in a loop
in Python; "model.fit, 16 steps an execution" is Keras's own loop with the program's metrics, which
leaves Python once in 16 steps. All ways take turns; each is a process of its own.

    python benchmarks/train_rate.py --runs=3 --examples=9000000 --last_minutes=10
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
import summary
from absl import app, flags

from slipstream_tf.cli import train
from slipstream_tf.cli.data import name_of, open_parts
from slipstream_tf.cli.settings import Settings, resolve

_RUNS = flags.DEFINE_integer("runs", 3, "Turns.", lower_bound=1)
_EXAMPLES = flags.DEFINE_integer("examples", 9_000_000, "Examples of a run.", lower_bound=1)
_BATCHES = flags.DEFINE_integer("batches", 400, "Batches in memory, which repeat.", lower_bound=1)
_LAST = flags.DEFINE_float("last_minutes", 0.0, "A last run of slipstream-train of that length.")
_DATA = flags.DEFINE_string("data", None, "Data of slipstream-train; default: globo's clicks.")
_WAY = flags.DEFINE_string("way", None, "Of a process that this program starts.")
_EXTRA = flags.DEFINE_multi_string("train_flag", [], "name=value of slipstream-train.")

TRAIN, BARE, FIT = "slipstream-train", "bare steps", "model.fit, 16 steps an execution"
WAYS = (TRAIN, BARE, FIT)
_UNTIMED = 50  # Steps of a process before its clock runs.


def flags_of(examples: int) -> dict[str, Any]:
    """Returns the flags of slipstream-train."""
    data = _DATA.value or common.in_data_folder("globo_clicks.npz")
    task = {} if _DATA.value else {**common.GLOBO_49, "batch_size": 1024, **common.rates(0.0014)}
    return {"data": data, **task, "max_examples": examples, **common.extra_flags(_EXTRA.value)}


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Returns the settings that slipstream-train would have with these flags."""
    flag_set = train.make_flags()
    values, names = flag_set.parse([f"--{name}={value}" for name, value in given.items()])
    return resolve(values, names, name_of, flag_set)


def in_memory(way: str) -> float:
    """Returns the examples per second of `BARE` or `FIT`."""
    import keras
    import tensorflow as tf

    from slipstream_tf.cli.build import build_embeddings, build_model
    from slipstream_tf.distributed import SingleProcess

    settings = settings_of(flags_of(_EXAMPLES.value))
    keras.utils.set_random_seed(settings.seed)
    reader, comm = open_parts(settings).train, SingleProcess()
    embeddings = build_embeddings(settings, tuple(reader.spec.fields), comm)
    model = build_model(settings, embeddings, reader.spec.num_dense, comm)
    whole = reader.dataset().rebatch(settings.batch_size, drop_remainder=True)
    steps = max(1, min(_EXAMPLES.value // settings.batch_size, 40 * _BATCHES.value))
    if way == FIT:
        model.compile(model.optimizer, model.loss, metrics=["AUC"], steps_per_execution=16)
        batches = whole.take(_BATCHES.value).cache().repeat()
        model.fit(batches, steps_per_epoch=_BATCHES.value, verbose=0)
        start = time.perf_counter()
        model.fit(batches, steps_per_epoch=steps, verbose=0)
        return steps * settings.batch_size / (time.perf_counter() - start)

    @tf.function(reduce_retracing=True)
    def step(features: Any, label: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = model.loss(tf.cast(tf.reshape(label, [-1, 1]), tf.float32), logits)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    batches = list(whole.take(_BATCHES.value))
    for index in range(_UNTIMED):
        step(*batches[index % len(batches)])
    start = time.perf_counter()
    for index in range(steps):
        step(*batches[index % len(batches)])
    return steps * settings.batch_size / (time.perf_counter() - start)


def trained(examples: int) -> float:
    """Returns the examples per second of a run of slipstream-train, from start to end of training.

    Opening the data and measuring the test part are no part of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = common.train(flags_of(examples), Path(folder) / "run")
    seconds = record["seconds"]["training"] + record["seconds"]["window_ends"]
    return record["examples"]["trained"] / seconds


def apart(way: str) -> float:
    """Returns what `in_memory` does in a process of its own."""
    passed = [argument for argument in sys.argv[1:] if not argument.startswith("--output")]
    command = [sys.executable, __file__, *passed, f"--way={way}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str]) -> None:
    """Measures the ways in turn, then writes and prints the comparison."""
    if len(arguments) > 1:
        raise app.UsageError(f"{arguments[1]!r} is no flag. Allowed: --flag=value.")
    if _WAY.value is not None:
        print(json.dumps(in_memory(_WAY.value)))
        return
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(_RUNS.value):
        for way in WAYS:
            print(f"[{turn + 1}/{_RUNS.value}] {way}", flush=True)
            rates[way].append(trained(_EXAMPLES.value) if way == TRAIN else apart(way))
    over = {way: [a / b for a, b in zip(rates[TRAIN], rates[way], strict=True)] for way in WAYS}
    claims = {
        "train_over_bare": summary.claim(over[BARE], 0.9, "higher"),
        "train_over_fit_16": summary.claim(over[FIT], None, "higher"),
    }
    if _LAST.value:
        rate = trained(round(60 * _LAST.value * max(rates[TRAIN])))
        claims["long_run_over_bare"] = summary.claim([rate / max(rates[BARE])], 0.9, "higher")
    columns = [
        summary.column("way", list(WAYS)),
        summary.column(
            "examples per second", [rates[way] for way in WAYS], "{:,.0f}", "median each"
        ),
        summary.column(
            "slipstream-train, of it", [over[way] for way in WAYS], "{:.2f}", "median each"
        ),
    ]
    part = "one process" if _DATA.value else "globo_49, batches of 1,024"
    print(summary.write("train_rate", part, {"": columns}, claims))


if __name__ == "__main__":
    app.run(main)
