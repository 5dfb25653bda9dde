"""Shared helpers of the benchmarks: flags of slipstream-train, records and statistics."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app

from slipstream_tf.cli.flag_set import USAGE_ERROR
from slipstream_tf.telemetry.run_record import write_json

RECORD, FLAGS = "metrics.json", "flags.json"
# Arguments for a Python process that runs slipstream-train from this process's package. `-c` puts
# the working folder first on the path, from which Python would import sources without the op
# library.
IMPORTS = f"import sys; sys.path[:] = {[p for p in sys.path if p]!r}; "
TRAIN = ("-c", f"{IMPORTS}from slipstream_tf.cli.train import entry_point; entry_point()")

# Open MPI requires these variables when root starts it.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# Settings of the globo results from before `tuning.py`. They were chosen by hand on the test part,
# because the data had no validation part.
GLOBO_BY_HAND: Mapping[str, Any] = {
    "model": "dlrm", "mlp": "128,64", "rows_optimizer": "adagrad", "rows_learning_rate": 0.1,
    "rows_init": 0.2, "learning_rate": 0.003, "dim": 16, "dropout": 0.0,
}  # fmt: skip
# Result of the search globo_49 of `tuning.py`, without the learning rates, which depend on the
# number of trained examples.
GLOBO_49: Mapping[str, Any] = {
    "model": "dlrm", "mlp": "128,64", "dim": 32,
    "rows_optimizer": "adam", "rows_init": 0.05, "dropout": 0.1,
}  # fmt: skip
EXAMPLES_49: Mapping[str, Any] = {"negatives": 49, "clicks": 200_000}


# Settings of the kept results that were defaults of slipstream-train, which chooses them now.
_FORMER_DEFAULTS: Mapping[str, Any] = {
    "model": "dlrm", "batch_size": 1024, "epochs": 1, "rows_learning_rate": 0.05,
    "learning_rate": 0.001, "shuffle": "none",
}  # fmt: skip
# Name of the source file of each data set. A program in datasets/ prepares it.
DATASETS = {"globo": "globo_clicks.npz", "frappe": "frappe_x1.npz"}

# Quantiles of Student's t for a 95% interval, starting at one degree of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


def explicit(given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the former defaults of slipstream-train to flags, so that results keep their settings.

    Args:
        given: Flags of a run. A control's flags are returned unchanged, because it repeats the
            settings of another run.
    """
    if "control" in given:
        return dict(given)
    own = json.loads(Path(given["settings"]).read_text()) if "settings" in given else {}
    return {**{n: v for n, v in _FORMER_DEFAULTS.items() if n not in own}, **given}


def rates(rate: float, rows_rate: float | None = None) -> dict[str, float]:
    """Returns the flags of both learning rates."""
    return {"learning_rate": rate, "rows_learning_rate": rate if rows_rate is None else rows_rate}


def subsampled(fraction: float, **others: Any) -> dict[str, Any]:
    """Returns flags that drop a fraction of the examples.

    Dropping starts after a twentieth of the run.

    Args:
        fraction: The fraction of the examples to drop.
        **others: Further flags.
    """
    return {
        "policies": "skip_examples", "skip_score": "predicted_loss", "skip_fraction": fraction,
        "window_steps": 100, "warmup": 0.05, **others,
    }  # fmt: skip


def by_hand(data: str) -> Mapping[str, Any]:
    """Returns the hand-chosen settings of earlier results on a data set."""
    return {**GLOBO_BY_HAND, "rows_l2": 0} if "globo" in os.path.basename(data) else {}


def prepared(name: str, **options: Any) -> dict[str, str]:
    """Prepares a data set of DATASETS, unless it is already prepared.

    Args:
        name: The name of the data set.
        **options: Flags of its program in datasets/.

    Returns:
        The flags --data and --settings of slipstream-train.

    Raises:
        SystemExit: If the program failed. It has printed the reason.
    """
    programs = Path(__file__).parent / "datasets"
    folder = Path("runs", "prepared", "-".join([name, *(f"{n}_{v}" for n, v in options.items())]))
    manifest = folder / "prepared.json"
    if not manifest.exists() or not json.loads(manifest.read_text())["is_complete"]:
        file, arguments = in_data_folder(DATASETS[name]), [f"--{n}={v}" for n, v in options.items()]
        command = [sys.executable, str(programs / f"{name}.py"), file, f"--output={folder}"]
        if code := subprocess.run([*command, *arguments], check=False).returncode:
            raise SystemExit(code)
    return {"data": str(folder), "settings": str(programs / f"{name}.json")}


def opened(data: str, seed: int = 0, **options: Any) -> dict[str, str]:
    """Returns the flags of slipstream-train that open a data set.

    Args:
        data: A name in DATASETS, which is prepared first, or a value of --data. If it begins with
            the name of a data set or is generated data, the settings of this data are used.
        seed: The seed of the run. For globo, it selects the negatives and the split.
        **options: See `prepared`.
    """
    if data in DATASETS:
        seeded = {"seed": seed} if data == "globo" and seed else {}
        return prepared(data, **options, **seeded)
    name = re.split("[-:]", Path(data).name)[0]
    settings = Path(__file__).parent / "datasets" / f"{name}.json"
    return {"data": data, **({"settings": str(settings)} if settings.exists() else {})}


def in_data_folder(file: str) -> str:
    """Returns the path of a file in the data folder.

    The folder is $SLIPSTREAM_DATA, or ../shared/data by default.
    """
    folder = os.environ.get("SLIPSTREAM_DATA") or os.path.join("..", "shared", "data")
    return os.path.join(folder, file)


def extra_flags(texts: Sequence[str]) -> dict[str, str]:
    """Splits texts of the form name=value."""
    pairs = [text.removeprefix("--").partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not equals:
            raise app.UsageError(f"Invalid --train_flag={name}. Expected name=value.")
    return {name: value for name, _, value in pairs}


def integers(flag: str, texts: Sequence[str]) -> list[int]:
    """Parses a flag that takes a list of integers."""
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise app.UsageError(f"Invalid --{flag}={','.join(texts)}. Expected integers.") from None


def finished(folder: Path, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the record of a finished run with these flags, or None.

    Raises:
        SystemExit: If the folder contains a run with other flags.
    """
    record, reported = folder / RECORD, folder / FLAGS
    if not record.exists():
        return None
    before = json.loads(reported.read_text(encoding="utf-8")) if reported.exists() else None
    if before != given:
        raise SystemExit(
            f"{record} was made with other flags: {before}, not {given}. Delete {folder} or "
            "set --records to another folder."
        )
    return json.loads(record.read_text(encoding="utf-8"))


def train(
    given: Mapping[str, Any],
    folder: Path,
    match: Path | None = None,
    ranks: int = 1,
    chooses: bool = False,
    forks: bool = False,
) -> dict[str, Any]:
    """Runs slipstream-train unless the run is finished; returns its record.

    Args:
        given: The flags. Former defaults are added, see `explicit`.
        folder: The folder of the record.
        match: The record of the run that a control repeats.
        ranks: The number of simulated ranks for which gradient rows are counted.
        chooses: Whether slipstream-train chooses the settings that are not given.
        forks: Whether to fork this process, which saves seconds of imports for each run. This
            process must not have run operations of TensorFlow.
    """
    given = dict(given) if chooses else explicit(given)
    before = finished(folder, given)
    if before is not None:
        return before
    arguments = [f"--{name}={value}" for name, value in given.items()]
    if match is not None:
        arguments.append(f"--match={match}")
    write_json(str(folder / FLAGS), given)
    program = TRAIN
    if ranks > 1:
        program = ("-c", f"{IMPORTS}import simulated_ranks; simulated_ranks.train({ranks})")
    arguments.append(f"--output={folder}")
    if forks:
        code = _forked(arguments)
    else:
        command = [sys.executable, *program, *arguments]
        code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        reason = "was refused" if code == USAGE_ERROR else f"failed (exit code {code})"
        raise SystemExit(
            f"The run in {folder} {reason}. Its output is above. Flags: {' '.join(arguments)}"
        )
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


def _forked(arguments: Sequence[str]) -> int:
    """Runs slipstream-train in a fork of this process; returns the exit code."""
    import slipstream_tf.cli.session  # noqa: F401  Import TensorFlow and the models only once.

    process = multiprocessing.get_context("fork").Process(target=_train_quietly, args=(arguments,))
    process.start()
    process.join()
    return process.exitcode or 0


def _train_quietly(arguments: Sequence[str]) -> None:
    from slipstream_tf.cli.train import entry_point

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    entry_point(arguments)


def difference(value: float | None, other: float | None) -> float | None:
    """Returns value - other, or None if one of them is None."""
    return None if value is None or other is None else value - other


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95% confidence interval of the mean; None for one value."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = error * (_T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96)
    return mean - half, mean + half


def horovodrun(ranks: int, controller: str) -> list[str]:
    """Returns the command prefix that starts ranks on this host.

    Args:
        ranks: The number of ranks.
        controller: "gloo" or "mpi".
    """
    launcher = str(Path(sys.executable).parent / "horovodrun")
    return [launcher, "-np", str(ranks), f"--{controller}", "-H", f"localhost:{ranks}"]


def zipf_keys(
    rng: np.random.Generator, rows: int, shape: Sequence[int], exponent: float
) -> np.ndarray:
    """Draws keys from a Zipf distribution.

    Args:
        rng: The random generator.
        rows: The number of distinct keys. Keys are 0 .. rows - 1.
        shape: The shape of the result.
        exponent: The probability of a key is proportional to 1 / (key + 1)^exponent.

    Returns:
        int64 array of the given shape.
    """
    weights = 1.0 / np.arange(1, rows + 1) ** exponent
    edges = np.cumsum(weights / weights.sum())
    return np.minimum(np.searchsorted(edges, rng.random(shape)), rows - 1).astype(np.int64)


def pyplot(file: str) -> Any:
    """Returns matplotlib's pyplot with a non-interactive backend.

    It prints a hint and returns None if matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as found
    except ImportError:
        print(
            f"{file} was not plotted, because matplotlib is not installed. Run pip install "
            "matplotlib and repeat the command. Finished runs are not repeated."
        )
        return None
    return found
