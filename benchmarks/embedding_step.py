"""Milliseconds of one embedding step, beside other libraries: lookup, gradient sum, update.

26 tables of 100,000 rows x 16 and 8 of 1,000,000 x 64, batch 2,048, one Zipf key per table. Every
library is a process of its own, on the same keys; they take turns (A B C A B C ...), and what
counts is the ratio within a turn.

    python benchmarks/embedding_step.py --runs=7
    python benchmarks/embedding_step.py --shapes=26x100000x16 --peers=fbgemm --rules=adagrad
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import awake
import common
import numpy as np
from absl import app, flags
from peers import Peer, Worker

from slipstream_tf.telemetry.run_record import machine, write_json

_RUNS = flags.DEFINE_integer("runs", 7, "Turns of each comparison.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 50, "Steps of a turn.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 2048, "Inputs of a batch.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 2, "Threads of each library.", lower_bound=1)
_SHAPES = flags.DEFINE_list(
    "shapes", ["26x100000x16", "8x1000000x64"], "Tables x rows of a table x values of a row."
)
_RULES = flags.DEFINE_list("rules", ["sgd", "adagrad", "rowwise_adagrad", "adam"], "Update rules.")
_PEERS = flags.DEFINE_list("peers", ["fit", "fbgemm", "tfra", "keras"], "Measured beside the ops.")
_ENVIRONMENTS = flags.DEFINE_string("environments", "runs/peers", "Folder of the peers' Pythons.")
_OUTPUT = flags.DEFINE_string("output", "results", "Folder of the JSON and the table.")

_ZIPF = 1.05
_RATE = 0.01
_ALL = ("sgd", "adagrad", "rowwise_adagrad", "adam")
OURS = Peer("slipstream_tf, ops", None, ["native.py"], _ALL)
PEERS: Mapping[str, Peer] = {
    "fit": Peer("slipstream_tf, layer in model.fit", None, ["native.py", "fit"], _ALL),
    "fbgemm": Peer(
        "FBGEMM, table-batched", "torch", ["fbgemm.py"], ("sgd", "adagrad", "rowwise_adagrad")
    ),
    "tfra": Peer("TFRA, dynamic embedding", "tfra", ["tfra.py"], ("sgd", "adagrad")),
    "keras": Peer("Keras 3, Embedding", None, ["keras_layers.py"], ("sgd", "adagrad")),
}


def compare(
    peers: Mapping[str, Peer], settings: Mapping[str, Any], folder: Path
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Lets the libraries take turns.

    Returns:
        Per peer the mean milliseconds of a step, turn by turn; and versions.
    """
    with contextlib.ExitStack() as stack:
        workers = {}
        versions: dict[str, str] = {}
        for name, peer in peers.items():
            workers[name] = stack.enter_context(Worker(peer, folder, settings["threads"]))
            versions.update(workers[name].make(settings))
        # One of ours, and of `fit`, makes all steps of a turn.
        steps = {name: 1 if name in ("ops", "fit") else _STEPS.value for name in peers}
        for name, worker in workers.items():
            worker.run(steps[name])
        found: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(_RUNS.value):
            for name, worker in workers.items():
                found[name].append(sum(worker.run(steps[name])) / _STEPS.value)
    return found, versions


def rows_of(shape: str, rule: str, found: Mapping[str, Sequence[float]]) -> list[str]:
    """The lines of the table for one comparison."""
    lines = []
    for name, runs in found.items():
        ratios = [theirs / ours for theirs, ours in zip(runs, found["ops"], strict=True)]
        label = (OURS if name == "ops" else PEERS[name]).label
        ratio = "" if name == "ops" else f"{statistics.median(ratios):.2f}"
        every = " ".join(f"{run:.2f}" for run in runs)
        median = f"{statistics.median(runs):.2f}"
        lines.append(f"| {shape} | {rule} | {label} | {ratio} | {median} | {every} |")
    return lines


def read_shape(text: str) -> tuple[int, int, int]:
    """Reads tables x rows x values."""
    try:
        tables, rows, dim = (int(part) for part in text.split("x"))
    except ValueError:
        raise app.UsageError(f"--shapes: {text!r}. Allowed: e.g. 26x100000x16.") from None
    return tables, rows, dim


def choose(names: Sequence[str], rules: Sequence[str]) -> dict[str, dict[str, Peer]]:
    """Returns the peers of each rule.

    Raises:
        app.UsageError: a name is unknown.
    """
    for flag, texts, allowed in (("peers", names, PEERS), ("rules", rules, _ALL)):
        for text in texts:
            if text not in allowed:
                raise app.UsageError(f"--{flag}: {text!r}. Allowed: {', '.join(allowed)}.")
    return {
        rule: {"ops": OURS, **{name: PEERS[name] for name in names if rule in PEERS[name].rules}}
        for rule in rules
    }


def main(arguments: Sequence[str]) -> None:
    """Measures, prints and writes."""
    if len(arguments) > 1:
        raise app.UsageError(f"{arguments[1]!r} is no flag. Allowed: --flag=value.")
    shapes = {text: read_shape(text) for text in _SHAPES.value}
    peers = choose(_PEERS.value, _RULES.value)
    folder = Path(_ENVIRONMENTS.value)
    lines = [
        "| tables x rows x dim | rule | library | times as long | median ms a step | all turns |",
        "|---|---|---|---|---|---|",
    ]
    runs, versions = [], {}
    is_awake = awake.keep()
    print("\n".join(lines))
    for text, (tables, rows, dim) in shapes.items():
        shape = (_STEPS.value, _BATCH.value, tables)
        keys = common.zipf_keys(np.random.default_rng(0), rows, shape, _ZIPF)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "keys.npy"
            np.save(file, keys)
            for rule, chosen in peers.items():
                settings = {"tables": tables, "rows": rows, "dim": dim, "batch": _BATCH.value,
                            "rule": rule, "learning_rate": _RATE, "threads": _THREADS.value,
                            "keys": str(file)}  # fmt: skip
                found, told = compare(chosen, settings, folder)
                versions.update(told)
                del settings["keys"]
                runs.append({"settings": settings, "milliseconds": found})
                lines += rows_of(text, rule, found)
                print("\n".join(lines[-len(found) :]), flush=True)
                # A measurement that is stopped leaves what it has measured.
                record = {"runs": runs, "steps": _STEPS.value, "zipf": _ZIPF}
                write(lines, {**record, "versions": versions, "awake": is_awake})


def write(lines: Sequence[str], record: Mapping[str, Any]) -> None:
    """Writes embedding_step.json and .md."""
    output = Path(_OUTPUT.value)
    write_json(str(output / "embedding_step.json"), {**record, "machine": machine()})
    (output / "embedding_step.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
