"""`slipstream-demo`: measures the layer's speed and compares skipping with its controls.

Each run is a separate process with the same seed, so that initial weights and data order are the
same. The program prints tables and a verdict, and writes demo.json and a page of learning curves.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from slipstream_tf._utils import agent
from slipstream_tf.cli import data as data_set
from slipstream_tf.cli.flag_set import (
    RUN_ERROR,
    USAGE_ERROR,
    Flag,
    FlagSet,
    Integer,
    Number,
    RunError,
    Text,
    UsageError,
)
from slipstream_tf.cli.program import run_program
from slipstream_tf.cli.settings import read_record, resolve
from slipstream_tf.cli.train_flags import make_flags as make_train_flags
from slipstream_tf.telemetry.curves import SECONDS, auc_at, curve
from slipstream_tf.telemetry.report.drawing import require_matplotlib
from slipstream_tf.telemetry.report.runs import read_runs
from slipstream_tf.telemetry.report.writing import write_report
from slipstream_tf.telemetry.run_record import RECORD, write_json
from slipstream_tf.telemetry.table import format_table, number

# Default data: 2% clicks and a skewed distribution of keys. The sizes are whole batches.
_EXAMPLES, _QUICK_EXAMPLES = 999_424, 39_936
_GENERATED = "generated:{}:100000:0.02"
# Batch size and learning rate of the rows. None selects the rate by the data.
_Chosen: TypeAlias = tuple[int, float | None]
# Settings for the default data, tuned on its validation part.
_PLAIN: _Chosen = (1024, 0.006)
_SUBSAMPLED: _Chosen = (512, 0.0125)
# Pairs of maximum click rate and fraction to skip: the best trade-offs in
# benchmarks/results/skipping.md.
_FRACTIONS = ((0.05, 0.85), (0.15, 0.5), (1.0, 0.3))
# AUCs with a smaller difference count as equal, because the spread between seeds is larger.
_EQUAL_AUC = 0.001
_POINTS, _WARMUP = 16, 0.05
_HEADER = ("run", "test AUC", "log loss", "examples trained", "seconds", "plain AUC at that time")
LABELS: Mapping[str, str] = {
    "plain": "plain",
    "predicted": "skipping by predicted loss",
    "uniform": "uniform negative sampling",
    "random": "random skipping",
    "stop": "plain, stopped early",
}
_STORY = """
Most examples are easy. A small pilot model predicts the loss of each example, and the second run
mostly trains examples with a high predicted loss. Weights compensate for the skipped examples.
Three controls train as many examples and show whether the pilot improves the result."""
# Sizes for the speed measurement. Keras gets fewer steps, because its step takes about a hundred
# times as long.
_ROWS, _DIM, _BATCH_SIZE = 1_000_000, 32, 512
_STEPS, _UNTIMED = {"keras": 20, "slipstream": 200}, 5

_FLAGS = {
    "Data and output": (
        Flag("data", Text(), "data set, as for slipstream-train", None,
             "synthetic examples with a click rate of 2%"),
        Flag("output", Text(), "folder for demo.json, the records of the runs and the page of "
             "learning curves", "runs/demo"),
        Flag("examples", Integer(1), "number of training examples that each run reads", None,
             f"{_EXAMPLES:,}"),
        Flag("quick", None, f"train on {_QUICK_EXAMPLES:,} examples, unless --examples is given"),
    ),
    "Runs": (
        Flag("skip_fraction", Number(0, 1, True, True), "fraction of the examples to skip after "
             "the warm-up", None,
             "0.85 for a click rate of at most 5%, 0.5 for at most 15%, else 0.3"),
        Flag("seed", Integer(0, (1 << 31) - 1), "seed of all runs", 0),
        Flag("threads", Integer(1, 1024), "threads of TensorFlow and of the data pipeline", None,
             "all cores"),
    ),
}  # fmt: skip


def make_flags() -> FlagSet:
    """Returns the flags of `slipstream-demo`."""
    return FlagSet(
        "slipstream-demo",
        "Compares the speed of the embedding layer with the layer of Keras. Then trains a model "
        "plainly and with skipping by predicted loss, and compares them with controls that train "
        "as many examples: uniform negative sampling, random skipping, and plain training that "
        "stops early. Prints the quality and the seconds of the runs, and plots learning curves.",
        ("slipstream-demo", "slipstream-demo --data=day_0.tsv"),
        _FLAGS,
    )


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Measures the layer, trains five runs and reports the results.

    Raises:
        UsageError: If a flag or the data is invalid.
        RunError: If a run fails.
    """
    output = values["output"]
    maximum = values["examples"] or (_QUICK_EXAMPLES if values["quick"] else _EXAMPLES)
    data = values["data"] or _GENERATED.format(maximum)
    examples, plain, subsampled = maximum, _PLAIN, _SUBSAMPLED
    if values["data"]:
        size, examples = size_of(data, maximum)  # Raises an error if the data cannot be read.
        plain = subsampled = (size, None)
    call = f"print(json.dumps(demo.measure_speed({_ROWS}, {values['threads'] or 0})))"
    speed = json.loads(_run(f"import json; from slipstream_tf.cli import demo; {call}"))
    print(f"{speed_words(**speed)}\n{_STORY}\n\nData: {data}", flush=True)
    common = {"seed": values["seed"], "threads": values["threads"]}
    seen = {**common, "data": data, "max_examples": maximum}
    records = {"plain": _trained(output, "plain", {**seen, **_flags(plain, examples)})}
    fraction = values["skip_fraction"]
    fraction = fraction_for(records["plain"]) if fraction is None else fraction
    for name, flags in subsampled_flags(subsampled, examples, fraction).items():
        records[name] = _trained(output, name, {**seen, **flags})
    for name in ("random", "stop"):
        matched = {"control": name, "match": os.path.join(output, "predicted", RECORD)}
        records[name] = _trained(output, name, {**common, **matched})
    sentence = verdict(records)
    print(f"\n{comparison(records)}\n\n{sentence}", flush=True)
    path = os.path.join(output, "demo.json")
    write_json(path, {"data": data, "speed": speed, "verdict": sentence, "runs": records})
    print(f"Details: {path}\n{_drawn(output)}")


def size_of(data: str, maximum: int) -> tuple[int, int]:
    """Returns batch size and number of training examples for a data set.

    Args:
        data: Value of --data of slipstream-train.
        maximum: Maximum number of examples to train.

    Returns:
        The batch size that slipstream-train chooses, and the number of examples, at most `maximum`.
        The number is an estimate for text files.
    """
    flags = make_train_flags()
    given = flags.parse([f"--data={data}", "--epochs=1"])
    settings = resolve(*given, data_set.facts_of, flags)
    found = data_set.open_parts(settings).num_examples
    return settings.batch_size, maximum if found is None else min(maximum, found)


def subsampled_flags(chosen: _Chosen, examples: int, fraction: float) -> dict[str, dict[str, Any]]:
    """Returns the slipstream-train flags of the two runs that skip examples.

    Args:
        chosen: Batch size and learning rate of the rows. None selects the rate by the data.
        examples: Number of examples that a run sees.
        fraction: Fraction of the examples to skip after the warm-up.

    Returns:
        Flags by run name: a run that skips by predicted loss, and a run with uniform negative
        sampling.
    """
    kept = _WARMUP + (1 - _WARMUP) * (1 - fraction)
    window = max(5, min(100, round(examples / chosen[0] / 40)))
    subsampled = {
        **_flags(chosen, examples * kept),
        "policies": "skip_examples", "skip_score": "predicted_loss",
        "skip_fraction": fraction, "warmup": _WARMUP, "window_steps": window,
    }  # fmt: skip
    return {"predicted": subsampled, "uniform": {**subsampled, "pilot": "label"}}


def _flags(chosen: _Chosen, trained: float) -> dict[str, Any]:
    size, rate = chosen
    return {
        "batch_size": size, "rows_learning_rate": rate, "epochs": 1,
        "evaluate_every": max(1, round(trained / size / _POINTS)),
    }  # fmt: skip


def fraction_for(plain: Mapping[str, Any]) -> float:
    """Chooses and prints the fraction of examples to skip by click rate.

    Args:
        plain: The metrics.json of plain training. The click rate is the rate of its test part.
    """
    rate = plain["test"]["clicks"] / plain["test"]["examples"]
    fraction = next(fraction for maximum, fraction in _FRACTIONS if rate <= maximum)
    print(f"Click rate of the test part: {rate:.1%}. Fraction to skip: {fraction:.0%}.", flush=True)
    return fraction


def speed_words(rows: int, dim: int, batch_size: int, keras: float, slipstream: float) -> str:
    """Returns a table of the speed of both layers and an explanation.

    Args:
        rows: Number of rows of the table.
        dim: Number of values per row.
        batch_size: Number of examples per step.
        keras: Seconds per step with `keras.layers.Embedding`.
        slipstream: Seconds per step with `slipstream_tf.keras.Embedding`.
    """
    layers = {"keras.layers.Embedding": keras, "slip.keras.Embedding": slipstream}
    cells = [
        (name, f"{1e3 * spent:.2f}", f"{batch_size / spent:,.0f}") for name, spent in layers.items()
    ]
    return (
        f"Training of a small model with a table of {rows:,} x {dim} values in batches of "
        f"{batch_size}:\n{format_table(('layer', 'ms per step', 'examples per second'), cells)}\n"
        f"On this machine, slip.keras.Embedding is {keras / slipstream:.0f} times as fast. Both "
        "layers update the rows of a batch,\nbut in Keras, the optimizer processes all rows of "
        "the table in each step."
    )


def comparison(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table with a row per run.

    Args:
        records: The metrics.json of each run by run name.
    """
    rows = []
    for name, record in records.items():
        test, spent = record["test"], _seconds(record)
        trained = record["examples"]["trained"]
        fraction = trained / records["plain"]["examples"]["trained"]
        by_then = None if test["auc"] is None else plain_at(records, spent)
        rows.append(
            (LABELS[name], number(test["auc"], 4), number(test["log_loss"], 4),
             f"{trained:,} ({fraction:.0%})", f"{spent:.1f}", number(by_then, 4))
        )  # fmt: skip
    return format_table(_HEADER, rows)


def plain_at(records: Mapping[str, Mapping[str, Any]], spent: float) -> float:
    """Returns the AUC of plain training after `spent` seconds, interpolated."""
    return auc_at(curve(records["plain"], SECONDS), spent)


def verdict(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Compares skipping by predicted loss with plain training and with the controls.

    Args:
        records: The metrics.json of each run by run name, see `LABELS`.

    Returns:
        The verdict in a few sentences.
    """
    auc = {name: record["test"]["auc"] for name, record in records.items()}
    if any(value is None for value in auc.values()):
        return "The runs have no AUC to compare, because all labels of the test part are equal."
    predicted, plain = records["predicted"], records["plain"]
    if not predicted["examples"]["skipped"]:
        return "No example was skipped, because training ended in the warm-up. Increase --examples."
    fraction = predicted["examples"]["trained"] / plain["examples"]["trained"]
    spent, whole = _seconds(predicted), _seconds(plain)
    then = plain_at(records, spent)
    names = {
        "uniform": "uniform negative sampling",
        "random": "random skipping",
        "stop": "stopping early",
    }
    gains = {name: auc["predicted"] - auc[name] for name in names}
    controls = ", ".join(_compared(gain, names[name]) for name, gain in gains.items())
    sentences = [
        f"Skipping by predicted loss trains {fraction:.0%} of the examples in {spent / whole:.0%} "
        "of the time of plain training.",
        f"The final model is {_compared(auc['predicted'] - auc['plain'], 'plain training')}, "
        f"and {_compared(auc['predicted'] - then, 'plain training after the same time')}.",
        f"Compared with controls that train as many examples, it is {controls}.",
    ]
    if min(gains["random"], gains["stop"]) < -_EQUAL_AUC:
        sentences.append(
            "The choice of skipped examples harms quality here: train all, or skip fewer."
        )
    elif gains["uniform"] <= _EQUAL_AUC:
        sentences.append("The pilot does not improve the model here: --pilot=label is simpler.")
    return "\n".join([*sentences, "Repeat with other seeds: a single seed proves little."])


def _compared(gain: float, what: str) -> str:
    if abs(gain) <= _EQUAL_AUC:
        return f"level with {what} ({gain:+.4f} AUC)"
    return f"{abs(gain):.4f} AUC {'above' if gain > 0 else 'below'} {what}"


def _seconds(record: Mapping[str, Any]) -> float:
    """Returns the seconds of training, including the ends of windows."""
    return float(record["evaluations"][-1]["seconds"])


def _drawn(output: str) -> str:
    """Draws the page of learning curves; returns a message."""
    try:
        require_matplotlib()
    except ImportError as error:
        return f"The page of learning curves was not written: {error}"
    runs = read_runs([os.path.join(output, name) for name in LABELS])
    page = write_report(runs, os.path.join(output, "report"))
    return f"Curves:  {page}"


def measure_speed(rows: int, threads: int) -> dict[str, float]:
    """Measures a training step with Keras's layer and this package's layer.

    Args:
        rows: Number of rows of the table. Keys are drawn uniformly.
        threads: Number of TensorFlow threads. 0 means all cores.

    Returns:
        The arguments of `speed_words`: "rows", "dim", "batch_size", and the median seconds per step
        as "keras" and "slipstream".
    """
    import keras
    import numpy as np
    import tensorflow as tf

    from slipstream_tf.keras import Embedding

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    found: dict[str, float] = {"rows": rows, "dim": _DIM, "batch_size": _BATCH_SIZE}
    for name, steps in _STEPS.items():
        optimizer = keras.optimizers.Adagrad(0.05)
        layer = keras.layers.Embedding(rows, _DIM)
        if name == "slipstream":
            layer = Embedding(rows, _DIM, optimizer=optimizer)
        items = np.random.default_rng(0).integers(0, rows, steps * _BATCH_SIZE)
        item = keras.Input((), dtype="int64")
        model = keras.Model(item, keras.layers.Dense(1, "sigmoid")(layer(item)))
        model.compile(optimizer, "binary_crossentropy")
        ends: list[float] = []
        timer = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, ends=ends: ends.append(time.perf_counter())
        )
        model.fit(items, items % 2, batch_size=_BATCH_SIZE, callbacks=[timer], verbose=0)
        found[name] = statistics.median(np.diff(ends[_UNTIMED:]))
    return found


def _trained(output: str, name: str, flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Runs slipstream-train in a child process and returns its metrics.json.

    Args:
        output: Output folder of the demo.
        name: Name of the run and of its subfolder.
        flags: Flags of slipstream-train by name. Flags with the value None are not passed.
    """
    folder = os.path.join(output, name)
    given = [f"--{k}={v}" for k, v in {**flags, "output": folder}.items() if v is not None]
    _run("from slipstream_tf.cli.train import entry_point; entry_point()", *given)
    return read_record(os.path.join(folder, RECORD), "output")


def _run(lines: str, *arguments: str) -> str:
    """Runs Python code in a child process; returns the last output line.

    Raises:
        UsageError: If the child exits with `USAGE_ERROR`.
        RunError: If the child exits with another nonzero code.
    """
    # Copy sys.path, so that the child imports the same package as this process.
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from slipstream_tf.cli.program import import_tensorflow; import_tensorflow(); {lines}"
    )
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode == USAGE_ERROR:
        raise UsageError("A run stopped at an invalid flag or file; its error is printed above.")
    if result.returncode:
        code = result.returncode
        reason = "" if code == RUN_ERROR else f" (exit code {code})"
        raise RunError(f"A run failed{reason}; its error is printed above.")
    return (result.stdout.splitlines() or [""])[-1]


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Runs the program as a single process, then exits the process."""
    if agent.rank() is not None:
        if agent.rank() == 0:
            print(
                "slipstream-demo: this program supports only a single process, but "
                f"{agent.rank_variable()} is set, which marks a rank of a job. Start it without "
                "horovodrun or mpirun; slipstream-train supports multiple ranks.",
                file=sys.stderr,
            )
        sys.exit(USAGE_ERROR)
    sys.exit(run_program(make_flags(), main, arguments))


if __name__ == "__main__":
    entry_point()
