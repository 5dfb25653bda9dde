"""`slipstream-demo`: plain, paper, random and stop on the same data, side by side.

Each run is a process of its own with the same seed: the same initial weights and data order, and
nothing left over from the run before. In: flags. Out: a table, an honest sentence, demo.json.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf import launch
from slipstream_tf.cli import demo_data
from slipstream_tf.cli.flag_set import (
    RUN_ERROR,
    USAGE_ERROR,
    FlagSet,
    Integer,
    Number,
    RunError,
    Text,
    UsageError,
)
from slipstream_tf.cli.program import run_program
from slipstream_tf.cli.settings import read_record
from slipstream_tf.telemetry.run_record import RECORD, write_json
from slipstream_tf.telemetry.table import format_table, number, seconds

RUNS = ("plain", "paper", "random", "stop")
_QUICK_INPUTS = 30_000
# AUCs closer than this count as equal: other seeds move them by more.
_EQUAL_AUC = 0.001
_HEADER = ("run", "test AUC", "log loss", "calibration", "inputs trained", "share", "seconds")


def make_flags() -> FlagSet:
    """Returns the program's flags."""
    flags = FlagSet(
        "slipstream-demo",
        "Trains the same model four times: plainly; with inputs of saturated keys left out (the "
        "paper's rule); with as many inputs left out at random; and plainly, but stopped at the "
        "paper run's number of trained inputs. Prints what that did to quality and cost.",
        ("slipstream-demo", "slipstream-demo --data=globo_clicks.npz --target_skip=0.5"),
    )
    flags.group("Data and output")
    flags.add(
        "data",
        Text(),
        None,
        "a data set, as for slipstream-train",
        f"${demo_data.ENVIRONMENT}, ../shared/data, MovieLens 1M (downloaded), or generated",
    )
    flags.add_switch("no_download", "download nothing: generate inputs where none are found")
    flags.add("output", Text(), "runs/demo", "folder for demo.json and the runs' records")
    flags.add("inputs", Integer(1), None, "inputs that each run sees", "all")
    flags.add_switch("quick", f"{_QUICK_INPUTS:,} inputs, generated if no --data is given")
    flags.group("Runs")
    flags.add("target_skip", Number(0, 1), None, "share of the hot inputs to skip", "the data's")
    text = "share of lookups that must be saturated"
    flags.add("alpha", Number(0, 1, True), None, text, "the data's")
    flags.add("seed", Integer(0, (1 << 31) - 1), 0, "of all four runs")
    flags.add("threads", Integer(1, 1024), None, "threads of TensorFlow and the data", "all cores")
    return flags


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Chooses the data, runs the four runs, prints and writes the comparison."""
    choice = _choose_data(values)
    print(f"Data: {choice.data}\nWhy:  {choice.reason}", flush=True)
    inputs = values["inputs"] or (_QUICK_INPUTS if values["quick"] else None)
    common = {"seed": values["seed"], "threads": values["threads"]}
    data = {**common, "data": choice.data, "max_inputs": inputs}
    paper = os.path.join(values["output"], "paper", RECORD)
    skipping = {name: values[name] for name in ("target_skip", "alpha")}
    flags = {
        "plain": data,
        "paper": {**data, "skip": "inputs", **skipping},
        "random": {**common, "control": "random", "match": paper},
        "stop": {**common, "control": "stop", "match": paper},
    }
    records = {}
    for name in RUNS:
        output = os.path.join(values["output"], name)
        _train({**flags[name], "output": output})
        records[name] = read_record(os.path.join(output, RECORD), "output")
    sentence = verdict(records)
    table = comparison(records)
    path = os.path.join(values["output"], "demo.json")
    write_json(
        path,
        {"data": choice.data, "reason": choice.reason, "verdict": sentence, "runs": records},
    )
    print(f"\n{table}\n\n{sentence}\nDetails: {path}")


def comparison(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of the runs.

    Args:
        records: metrics.json by run.

    Returns:
        A row per run; seconds are those of training and window ends.
    """
    rows = []
    for name, record in records.items():
        test, inputs = record["test"], record["inputs"]
        share = inputs["trained"] / records["plain"]["inputs"]["trained"]
        spent = record["seconds"]["training"] + record["seconds"]["window_ends"]
        rows.append(
            (
                name,
                number(test["auc"], 4),
                number(test["log_loss"], 4),
                number(test["calibration"], 3),
                f"{inputs['trained']:,}",
                f"{share:.1%}",
                seconds(spent),
            )
        )
    return format_table(_HEADER, rows)


def verdict(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Compares the paper run with plain training and with its controls.

    Args:
        records: metrics.json by run: plain, paper, random, stop.

    Returns:
        A few sentences.
    """
    auc = {name: record["test"]["auc"] for name, record in records.items()}
    if any(value is None for value in auc.values()):
        return "The test part has labels of one kind only; AUC is not defined and nothing compares."
    inputs = records["paper"]["inputs"]
    if not inputs["skipped"]:
        return (
            "The paper's rule skipped nothing here (no input was made of saturated keys alone), so "
            "the table compares equal runs. More inputs, a higher --target_skip or a lower --alpha "
            "would make it skip."
        )
    share = inputs["skipped"] / inputs["seen"]
    loss = auc["plain"] - auc["paper"]
    first = (
        f"Skipping inputs of saturated keys left out {share:.1%} of the inputs and "
        f"{_change(-loss)}."
    )
    gains = {
        "random skipping at the same rate": auc["paper"] - auc["random"],
        "plain training stopped at the same cost": auc["paper"] - auc["stop"],
    }
    words = [f"{_relation(gain)} {name} ({gain:+.4f} AUC)" for name, gain in gains.items()]
    second = f"It is {' and '.join(words)}."
    beaten = all(gain > _EQUAL_AUC for gain in gains.values())
    third = (
        "So in this run choosing inputs by drift was worth more than simply training on fewer"
        if beaten
        else "So in this run nothing shows that choosing inputs by drift is worth more than "
        "simply training on fewer"
    )
    third += ", and training on all of them was better still." if loss > _EQUAL_AUC else "."
    return f"{first} {second} {third} One seed is a hint, not a result."


def _change(difference: float) -> str:
    if abs(difference) <= _EQUAL_AUC:
        return f"moved the AUC by {difference:+.4f} from plain, no more than another seed would"
    return f"{'gained' if difference > 0 else 'lost'} {abs(difference):.4f} AUC against plain"


def _relation(gain: float) -> str:
    if abs(gain) <= _EQUAL_AUC:
        return "level with"
    return "better than" if gain > 0 else "worse than"


def _choose_data(values: Mapping[str, Any]) -> demo_data.Choice:
    if values["quick"] and values["data"] is None:
        return demo_data.Choice(
            f"generated:{_QUICK_INPUTS}", "--quick: generated from a fixed seed"
        )
    return demo_data.choose(values["data"], downloads=not values["no_download"])


def _train(flags: Mapping[str, Any]) -> None:
    """Runs slipstream-train in a process of its own; it tells what goes wrong itself."""
    arguments = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    # The same package as here, whatever the folder that this is started in.
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from slipstream_tf.cli.train import entry_point; entry_point()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.DEVNULL, check=False
    )
    if result.returncode == USAGE_ERROR:
        raise UsageError("A run was refused, see above.")
    if result.returncode:
        code = result.returncode
        reason = "" if code == RUN_ERROR else f" (exit code {code})"
        raise RunError(f"A run failed{reason}, see above.")


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Runs the program and ends the process with its exit code."""
    if launch.rank() is not None:
        if launch.rank() == 0:
            print(
                f"slipstream-demo: it is one process, but was started as a rank of a job "
                f"({launch.rank_variable()} is set). Start it without horovodrun or mpirun; "
                "slipstream-train is for several ranks.",
                file=sys.stderr,
            )
        sys.exit(USAGE_ERROR)
    sys.exit(run_program(make_flags(), main, arguments))


if __name__ == "__main__":
    entry_point()
