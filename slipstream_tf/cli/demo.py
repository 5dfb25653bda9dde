"""`slipstream-demo`: the layer's speed, a dry run, and the paper's rule beside its controls.

Each run is a process of its own with the same seed: the same initial weights and data order, and
nothing left over from the run before. In: flags. Out: tables, honest sentences, demo.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream_tf import disk, launch
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
from slipstream_tf.cli.settings import read_record
from slipstream_tf.telemetry.run_record import RECORD, write_json
from slipstream_tf.telemetry.table import format_table, number, seconds

_QUICK_INPUTS = 30_000
# AUCs closer than this count as equal: other seeds move them by more.
_EQUAL_AUC = 0.001
ENVIRONMENT = "SLIPSTREAM_DATA"
GLOBO_FILE = "globo_clicks.npz"

MOVIELENS_URL = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
MOVIELENS_SHA256 = "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"
MOVIELENS_TERMS = (
    "MovieLens 1M by GroupLens, University of Minnesota: free for research; no redistribution or "
    "commercial use without their permission (Harper and Konstan, 2015, doi 10.1145/2827872)"
)
_MOST_BYTES = 50 << 20
_TIMEOUT_SECONDS = 10.0
_HEADER = ("run", "test AUC", "log loss", "calibration", "examples trained", "share", "seconds")
LABELS: Mapping[str, str] = {
    "plain": "plain (the dry run)",
    "paper": "paper's rule (baseline)",
    "random": "as many skipped at random",
    "stop": "plain, stopped as early",
}
_WHY_PAPER = """
The paper's rule leaves out examples of saturated keys. It is a baseline, and expected to lose
against plain training, which sees every example. It is shown for its controls: random skipping and
an early stop at the same cost tell whether its choice of examples is worth anything."""
_WHAT_SECONDS_ARE = (
    "Seconds are of training and window ends. Those of a dry run compare with nothing: it watches\n"
    "for all policies. The last run watches nothing."
)
_ROWS = 1_000_000  # Of the table that the layer's speed is measured by.


_FLAGS = {
    "Data and output": (
        Flag("data", Text(), "a data set, as for slipstream-train", None,
             f"${ENVIRONMENT}, ../shared/data, MovieLens 1M (downloaded), or generated"),
        Flag("no_download", None, "download nothing: generate examples where none are found"),
        Flag("output", Text(), "folder for demo.json and the runs' records", "runs/demo"),
        Flag("examples", Integer(1), "examples that each run sees", None, "all"),
        Flag("quick", None, f"{_QUICK_INPUTS:,} examples, generated if no --data is given"),
    ),
    "Runs": (
        Flag("skip_share", Number(0, 1), "share of the hot examples to skip", None, "0.3"),
        Flag("skip_alpha", Number(0, 1, True), "share of lookups that must be saturated", None,
             "the data's"),
        Flag("seed", Integer(0, (1 << 31) - 1), "of all four runs", 0),
        Flag("threads", Integer(1, 1024), "threads of TensorFlow and the data", None, "all cores"),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Choice:
    """The data of a demo.

    Attributes:
        data: for `slipstream-train --data`.
        reason: why this one, in one sentence or more.
    """

    data: str
    reason: str


def make_flags() -> FlagSet:
    """Returns the program's flags."""
    return FlagSet(
        "slipstream-demo",
        "Measures the embedding layer beside Keras's. Then trains a model as a dry run, which "
        "trains plainly and tells what policies would save. Then trains it by the paper's rule, a "
        "baseline, and by its controls: as many examples left out at random, and a stop after as "
        "many trained examples. Prints what that did to quality and cost.",
        ("slipstream-demo", "slipstream-demo --data=globo_clicks.npz --skip_share=0.5"),
        _FLAGS,
    )


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Measures the layer, chooses the data, runs the four runs, prints and writes all of it."""
    if values["quick"] and values["data"] is None:
        choice = Choice(f"generated:{_QUICK_INPUTS}", "--quick: generated from a fixed seed")
    else:
        choice = choose(values["data"], downloads=not values["no_download"])
    if values["data"] is not None:
        data_set.name_of(values["data"])  # What cannot be read is refused at once.
    speed = _speed(_ROWS, values["threads"] or 0)
    print(f"{speed_words(**speed)}\n", flush=True)
    print(f"Data: {choice.data}\nWhy:  {choice.reason}", flush=True)
    inputs = values["examples"] or (_QUICK_INPUTS if values["quick"] else None)
    common = {"seed": values["seed"], "threads": values["threads"]}
    # All runs see the same examples: none of them may stop by itself.
    data = {**common, "data": choice.data, "max_examples": inputs, "early_stopping": 0}
    paper = os.path.join(values["output"], "paper", RECORD)
    skipping = {name: values[name] for name in ("skip_share", "skip_alpha")}
    flags = {
        # It trains as without policies.
        "plain": {**data, "dry_run": True, "skip_by": "row_drift", **skipping},
        "paper": {**data, "policies": "skip_examples", "skip_by": "row_drift", **skipping},
        "random": {**common, "control": "random", "match": paper},
        "stop": {**common, "control": "stop", "match": paper},
    }
    records = {}
    for name, of_run in flags.items():
        output = os.path.join(values["output"], name)
        _train({**of_run, "output": output})
        records[name] = read_record(os.path.join(output, RECORD), "output")
        if name == "plain":
            print("\nA dry run saves nothing, and tells what policies would have saved.")
            print(f"{records[name]['report']}\n{_WHY_PAPER}", flush=True)
    sentence = verdict(records)
    path = os.path.join(values["output"], "demo.json")
    found = {**dataclasses.asdict(choice), "speed": speed, "verdict": sentence, "runs": records}
    write_json(path, found)
    print(f"\n{comparison(records)}\n{_WHAT_SECONDS_ARE}\n\n{sentence}\nDetails: {path}")


def speed_words(rows: int, dim: int, batch_size: int, keras: float, slipstream: float) -> str:
    """Returns the table of both layers, and what makes the difference.

    Args:
        rows, dim: of the table.
        batch_size: of the training.
        keras: seconds of a step with `keras.layers.Embedding`.
        slipstream: seconds of a step with `slipstream_tf.keras.Embedding`.
    """
    layers = {"keras.layers.Embedding": keras, "slip.keras.Embedding": slipstream}
    cells = [
        (name, f"{1e3 * spent:.2f}", f"{batch_size / spent:,.0f}") for name, spent in layers.items()
    ]
    return (
        f"The layer: a small model in model.fit, one table of {rows:,} x {dim}, batches of "
        f"{batch_size}.\n{format_table(('layer', 'ms a step', 'examples per second'), cells)}\n"
        f"Ours was {keras / slipstream:.0f} times as fast here. Both move the rows alike: Keras's "
        "optimizer\ngoes through all of them in each step, this layer through those of the batch."
    )


def comparison(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of the runs.

    Args:
        records: metrics.json by run.

    Returns:
        A row per run; seconds are those of training and window ends, left out of a dry run.
    """
    rows = []
    for name, record in records.items():
        test, phases, trained = record["test"], record["seconds"], record["examples"]["trained"]
        measures = (("auc", 4), ("log_loss", 4), ("calibration", 3))
        quality = [number(test[measure], digits) for measure, digits in measures]
        share = trained / records["plain"]["examples"]["trained"]
        spent = seconds(phases["training"] + phases["window_ends"])
        spent = spent if record["dry_run"] is None else "watched"
        rows.append((LABELS[name], *quality, f"{trained:,}", f"{share:.1%}", spent))
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
    inputs = records["paper"]["examples"]
    if not inputs["skipped"]:
        return (
            "The paper's rule skipped nothing here (no example had saturated keys alone), so "
            "the table compares equal runs. More examples, a higher --skip_share or a lower "
            "--skip_alpha would make it skip."
        )
    share = inputs["skipped"] / inputs["seen"]
    loss = auc["plain"] - auc["paper"]
    skipped = f"Skipping examples of saturated keys left out {share:.1%} of them"
    gains = {
        "random skipping at the same rate": auc["paper"] - auc["random"],
        "plain training stopped at the same cost": auc["paper"] - auc["stop"],
    }
    words = [f"{_relation(gain)} {name} ({gain:+.4f} AUC)" for name, gain in gains.items()]
    second = f"It is {' and '.join(words)}."
    beaten = all(gain > _EQUAL_AUC for gain in gains.values())
    what = "choosing examples by drift"
    shown = f"{what} was" if beaten else f"nothing shows that {what} is"
    third = f"So in this run {shown} worth more than simply training on fewer"
    third += ", and training on all of them was better still." if loss > _EQUAL_AUC else "."
    return f"{skipped} and {_change(-loss)}. {second} {third} One seed is a hint, not a result."


def _change(difference: float) -> str:
    if abs(difference) <= _EQUAL_AUC:
        return f"moved the AUC by {difference:+.4f} from plain, no more than another seed would"
    return f"{'gained' if difference > 0 else 'lost'} {abs(difference):.4f} AUC against plain"


def _relation(gain: float) -> str:
    if abs(gain) <= _EQUAL_AUC:
        return "level with"
    return "better than" if gain > 0 else "worse than"


def choose(given: str | None, downloads: bool = True) -> Choice:
    """Decides on the data.

    In this order: what the user gave; globo clicks in the folder $SLIPSTREAM_DATA, or in
    ../shared/data beside the checkout that this is started in; MovieLens 1M, downloaded once to
    $XDG_CACHE_HOME, else ~/.cache; a seeded generator.

    Args:
        given: value of --data, or None.
        downloads: whether anything may be downloaded.

    Returns:
        The data and the reason.

    Raises:
        UsageError: $SLIPSTREAM_DATA is set, but the file is not there.
    """
    if given is not None:
        return Choice(given, "given by --data")
    path = local_globo()
    if path is not None:
        return Choice(str(path), f"found {GLOBO_FILE} on this machine")
    reasons = [f"no {GLOBO_FILE} in ${ENVIRONMENT} or ../shared/data"]
    if downloads:
        print(f"No {GLOBO_FILE} here; trying {MOVIELENS_URL} (6 MB) ...", file=sys.stderr)
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            path = download_movielens(cache / "slipstream_tf")
        except (OSError, ValueError, http.client.HTTPException) as error:
            reasons.append(f"MovieLens could not be downloaded ({error})")
        else:
            return Choice(str(path), f"{reasons[0]}; {MOVIELENS_TERMS}")
    else:
        reasons.append("no download wanted")
    return Choice("generated", "; ".join(reasons) + "; so examples are generated from a fixed seed")


def local_globo() -> Path | None:
    """Returns the path of the globo clicks on this machine, or None."""
    folder = os.environ.get(ENVIRONMENT)
    if folder:
        path = Path(folder) / GLOBO_FILE
        if not path.is_file():
            raise UsageError(
                f"Invalid {ENVIRONMENT}={folder}: no {GLOBO_FILE} in it. Allowed: a folder with "
                "that file, or unset the variable."
            )
        return path
    # `make demo` starts in the checkout; an installed package does not know where that is.
    for start in (Path.cwd(), Path(__file__).resolve().parents[2]):
        path = start.parent / "shared" / "data" / GLOBO_FILE
        if (start / "cc_ops").is_dir() and path.is_file():
            return path
    return None


def download_movielens(folder: Path) -> Path:
    """Fetches MovieLens 1M once, and checks that it is what it should be.

    Args:
        folder: where it is kept.

    Returns:
        Path of the archive.

    Raises:
        OSError: it cannot be fetched or written.
        ValueError: the archive is another one.
    """
    url, path = MOVIELENS_URL, folder / "ml-1m.zip"
    if path.is_file() and _sha256(path.read_bytes()) == MOVIELENS_SHA256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            archive = response.read(_MOST_BYTES + 1)
    except urllib.error.URLError as error:
        raise OSError(f"{url}: {error.reason}") from None
    if len(archive) > _MOST_BYTES:
        raise ValueError(f"{url}: longer than {_MOST_BYTES >> 20} MiB")
    if _sha256(archive) != MOVIELENS_SHA256:
        raise ValueError(f"{url}: not the archive that is expected (its SHA-256 differs)")
    with disk.whole_file(path) as partial:
        partial.write_bytes(archive)
    return path


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _speed(rows: int, threads: int) -> dict[str, Any]:
    """Returns what `slipstream_tf.cli.speed` measures, in a process of its own."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    printed = _run("speed", [str(rows), str(threads)], environment)
    return json.loads(printed.splitlines()[-1])


def _train(flags: Mapping[str, Any]) -> None:
    """Runs slipstream-train in a process of its own; it tells what goes wrong itself."""
    arguments = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    _run("train", arguments, os.environ)


def _run(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Runs a program of `slipstream_tf.cli`; returns what it printed."""
    # The same package as here, whatever the folder that this is started in.
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from slipstream_tf.cli.{module} import entry_point; entry_point()"
    )
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode == USAGE_ERROR:
        raise UsageError("A run was refused, see above.")
    if result.returncode:
        code = result.returncode
        reason = "" if code == RUN_ERROR else f" (exit code {code})"
        raise RunError(f"A run failed{reason}, see above.")
    return result.stdout


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
