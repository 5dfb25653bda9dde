"""Examples per second of slipstream-train compared with bare training steps.

A run is a process of slipstream-train including its start, reading, metrics and evaluation. Before
and after it, another process trains the same model on batches in memory, in turns: bare steps, the
same steps with the program's metrics, and `fit` with 16 steps per execution. The target is 90% of
the rate of bare steps in a run of ten minutes.

    python benchmarks/train_rate.py --examples=60000000
    python benchmarks/train_rate.py --examples=2000000 --seconds=5 --train_flag=batch_size=2048
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
import summary
from absl import app, flags

from slipstream_tf.cli import data
from slipstream_tf.cli.train import prepare
from slipstream_tf.cli.train_flags import make_flags

_DATA = flags.DEFINE_string(
    "data", "generated:2000000:100000:0.02", "Value of --data of slipstream-train."
)
_EXAMPLES = flags.DEFINE_integer(
    "examples",
    60_000_000,
    "Training examples per run. The data is repeated as needed.",
    lower_bound=1,
)
_RUNS = flags.DEFINE_integer("runs", 1, "Number of runs of slipstream-train.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 20.0, "Seconds per turn of bare steps.", lower_bound=0.1)
_EXTRA = flags.DEFINE_multi_string(
    "train_flag", [], "Flag name=value of slipstream-train for all measurements."
)
_BARE = flags.DEFINE_bool("bare", False, "Measure only bare steps and print their rates.")

# The number of batches is a multiple of the steps per execution, as are the turns.
_STEPS_PER_EXECUTION, _BATCHES, _MIN_FRACTION = 16, 13 * 16, 0.9
_BARE_WAY, _METRICS_WAY, _FIT_WAY = "bare steps", "with metrics", "fit, 16 steps per execution"


def train_arguments() -> list[str]:
    """Returns the flags of slipstream-train that all measurements share."""
    given = common.extra_flags(_EXTRA.value)
    return [f"--data={_DATA.value}", *(f"--{name}={value}" for name, value in given.items())]


def bare_rates() -> dict[str, list[float]]:
    """Trains in turns; returns examples per second by variant."""
    settings = prepare(*make_flags().parse(train_arguments())).settings
    from slipstream_tf.cli import build
    from slipstream_tf.distributed import SingleProcess

    train = data.open_parts(settings).train
    batches = train.dataset().take(_BATCHES).cache().repeat()
    comm = SingleProcess()

    def make() -> Any:
        embeddings = build.build_embeddings(settings, train.spec.features, comm)
        model = build.build_model(settings, embeddings, train.spec.num_dense, comm)
        model.start_at(0.02)
        return model

    ways: dict[str, Callable[[int], None]] = {}
    for way in (_BARE_WAY, _METRICS_WAY, _FIT_WAY):
        model = make()
        if way == _BARE_WAY:
            model.compile(model.optimizer, model.loss)
        if way == _FIT_WAY:
            model.compile(model.optimizer, model.loss, steps_per_execution=_STEPS_PER_EXECUTION)
            ways[way] = functools.partial(fit, model, batches)
        else:
            ways[way] = stepping(model, batches)
        # Build the graphs and create all rows.
        ways[way](_BATCHES)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    steps = dict.fromkeys(ways, _BATCHES)
    for turn in range(4):
        for way in list(ways) if turn % 2 else reversed(ways):
            start = time.perf_counter()
            ways[way](steps[way])
            rate = steps[way] / (time.perf_counter() - start)
            executions = max(1, round(rate * _SECONDS.value / _STEPS_PER_EXECUTION))
            steps[way] = executions * _STEPS_PER_EXECUTION
            # The first turn only determines the number of steps of the next turns.
            if turn:
                rates[way].append(rate * settings.batch_size)
    return rates


def stepping(model: Any, batches: Any) -> Callable[[int], None]:
    """Returns a function that trains steps with the model's step function."""
    model.train_on_batch(*next(iter(batches)))
    model.make_train_function()
    iterator = iter(batches)

    def train(steps: int) -> None:
        logs: dict[str, Any] = {}
        for _ in range(steps):
            logs = model.train_function(iterator)
        float(logs["loss"])

    return train


def fit(model: Any, batches: Any, steps: int) -> None:
    """Trains steps with `fit`."""
    model.fit(batches, steps_per_epoch=steps, verbose=0)


def bare_process() -> dict[str, float]:
    """Returns the median rates of bare steps in a separate process."""
    arguments = [f"--data={_DATA.value}", f"--seconds={_SECONDS.value}", "--bare"]
    arguments += [f"--train_flag={text}" for text in _EXTRA.value]
    command = [sys.executable, __file__, *arguments]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    rates = json.loads(printed.splitlines()[-1])
    return {way: statistics.median(turns) for way, turns in rates.items()}


def train_process() -> tuple[float, dict[str, Any]]:
    """Runs slipstream-train; returns its total seconds and its record."""
    epochs = math.ceil(_EXAMPLES.value / data_examples())
    arguments = [*train_arguments(), f"--epochs={epochs}", f"--max_examples={_EXAMPLES.value}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *common.TRAIN, *arguments, f"--output={folder}"]
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - start
        record = json.loads((Path(folder) / common.RECORD).read_text(encoding="utf-8"))
    return seconds, record


def data_examples() -> int:
    """Returns the number of examples in one pass."""
    settings = prepare(*make_flags().parse(train_arguments())).settings
    found = data.open_parts(settings).num_examples
    if found is None:
        raise app.UsageError(
            f"Invalid --data={_DATA.value}. Expected data with a known number of examples."
        )
    return found


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    if _BARE.value:
        print(json.dumps(bare_rates()))
        return
    bare = [bare_process()]
    trained: list[float] = []
    phases: list[dict[str, float]] = []
    for _ in range(_RUNS.value):
        seconds, record = train_process()
        trained.append(record["examples"]["trained"] / seconds)
        phases.append({**record["seconds"], "whole process": seconds})
        bare.append(bare_process())
    shares: dict[str, list[float]] = {}
    for way in bare[0]:
        around = [(one[way] + two[way]) / 2 for one, two in itertools.pairwise(bare)]
        shares[way] = [rate / other for rate, other in zip(trained, around, strict=True)]
    ways = [*bare[0], "slipstream-train"]
    rates = [*([one[way] for one in bare] for way in bare[0]), trained]
    tables = {
        "": [
            summary.column("variant", ways),
            summary.column("examples/s", rates, "{:,.0f}", "median each"),
            summary.column(
                "slipstream-train / variant", [*shares.values(), None], "{:.3f}", "median each"
            ),
        ],
        "Seconds of slipstream-train": [
            summary.column("phase", list(phases[0])),
            summary.column(
                "seconds", [[run[name] for run in phases] for name in phases[0]], "{:.1f}", "mean"
            ),
        ],
    }
    name = _DATA.value.partition(":")[0].rpartition("/")[2]
    claims = {
        f"{name}_fraction_of_bare_steps": summary.claim(shares[_BARE_WAY], _MIN_FRACTION, "higher"),
        f"{name}_fraction_of_fit": summary.claim(shares[_FIT_WAY], None, "higher"),
    }
    part = f"{_DATA.value}, {_EXAMPLES.value:,} examples"
    print(summary.write("train_rate", part, tables, claims))


if __name__ == "__main__":
    app.run(main)
