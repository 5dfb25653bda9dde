"""Bytes and seconds of multi-rank training, plain and with reduced communication.

Each run is a job of slipstream-train, one after the other. Ranks run on this host under horovodrun,
or, with --rate, on simulated hosts (Linux network namespaces) with shaped links. A run with an
existing metrics.json is not repeated, so the program can be interrupted and restarted.

    python benchmarks/network.py --seeds=0,1,2
    python benchmarks/network.py --rate=1gbit --runs=defer --repeats=5
    python benchmarks/network.py --controller=mpi --ranks=2 --runs=plain --repeats=5
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

import common
import network_report
import summary
from absl import app, flags
from network_report import ALONE, BASELINES, Case

from slipstream_tf.cli import data as train_data
from slipstream_tf.cli.flag_set import UsageError
from slipstream_tf.telemetry.run_record import write_json

_DATA = flags.DEFINE_string(
    "data",
    "globo",
    "globo, which is prepared first, or a value of --data of slipstream-train.",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
_RANKS = flags.DEFINE_list("ranks", ["2", "4"], "Numbers of ranks to measure.")
_PLACEMENTS = flags.DEFINE_list(
    "placements", ["replicated", "sharded"], "Placements of rows: replicated, sharded."
)
_RUNS = flags.DEFINE_list(
    "runs", [], "Names of the runs, such as defer_0.01_bf16. The run plain is added."
)
_RATE = flags.DEFINE_string(
    "rate",
    None,
    "Bandwidth of each rank's link in the format of tc, such as 1gbit. Without it, all "
    "ranks run on this host.",
)
_CONTROLLER = flags.DEFINE_enum(
    "controller",
    "gloo",
    ["gloo", "mpi"],
    "Transport between ranks on this host: Gloo with TCP, or Open MPI with shared memory.",
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 1, "Number of times that each run is repeated. The seconds are medians.",
    lower_bound=1,
)  # fmt: skip
_BATCH = flags.DEFINE_integer(
    "global_batch", 1024, "Examples per step, over all ranks.", lower_bound=1
)
_MAX_INPUTS = flags.DEFINE_integer(
    "max_examples",
    None,
    "Maximum number of training examples, as in slipstream-train.",
    lower_bound=1,
)
_EXTRA = flags.DEFINE_multi_string(
    "train_flag",
    [],
    "Flag name=value of slipstream-train for every run. Flags of the run override it.",
)
_TIMEOUT = flags.DEFINE_float(
    "timeout", 7200.0, "Maximum seconds per run. A longer run counts as failed."
)
_RECORDS = flags.DEFINE_string(
    "records", "runs/network", "Folder of the run records (metrics.json)."
)

# The default runs. For the parts of a name, see `flags_of`.
RUNS: Mapping[str, Sequence[str]] = {
    "replicated": (
        *("plain", "plain_bf16", "mask", "defer", "defer_0.01", "defer_0.015"),
        *("defer_bf16", "defer_0.01_bf16", "defer_0.015_bf16"),
    ),
    "sharded": (
        *("plain", "plain_bf16", "mask", "defer", "defer_0.01", "defer_0.015"),
        *("defer_bf16", "defer_0.01_bf16", "defer_0.015_bf16"),
        "plain_prefetch",
    ),
}
_NUMBER = r"\d+(?:\.\d+)?"
_NAME = re.compile(
    r"(?P<skip>plain|unwatched|fae|hotline|mask|"
    rf"defer(?:_(?P<movement>{_NUMBER}))?)"
    r"(?:_age(?P<age>\d+))?(?:_(?P<wire>bf16|int8|auto))?(?P<prefetch>_prefetch)?"
)
_WIRES = {"bf16": "bfloat16", "int8": "int8", "auto": "auto"}
_SKIPS: Mapping[str, Mapping[str, Any]] = {
    # Watched to record the traffic per window. The hot set is tiny, so that the report of a window
    # has almost no keys.
    "plain": {"watch": True, "hot_set_memory": "10KiB", "window_steps": 100},
    "unwatched": {},
    "fae": {"schedule": "fae"},
    "hotline": {"schedule": "hotline"},
    "mask": {"policies": "mask_gradients"},
    "defer": {"policies": "defer_gradients"},
}
# A rank has one core on a small machine. Use --train_flag=threads=N for others.
_SEVERAL = {"threads": 1}


def flags_of(name: str, placement: str) -> dict[str, Any]:
    """Returns the flags of slipstream-train for the name of a run.

    A name starts with plain, unwatched (plain without the engine, therefore without traffic per
    window), fae or hotline (baselines for sharded tables), mask, defer or defer_M
    (--defer_movement=M). It can continue with _ageA (--defer_max_age=A), then _bf16, _int8 or _auto
    (--wire_dtype), then _prefetch (sharded tables).

    Raises:
        UsageError: If the name is invalid.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise app.UsageError(
            f"Invalid --runs: {name!r}. Expected plain, unwatched, fae, hotline, mask, defer or "
            "defer_M, followed by _ageA, _bf16, _int8 or _auto, and _prefetch in this order, such "
            "as defer_0.01_bf16 or plain_bf16."
        )
    skip = found["skip"].split("_")[0]
    if skip != "defer" and found["age"]:
        raise app.UsageError(
            f"Invalid --runs: {name!r}. Expected no _ageA, because {skip} defers no gradient."
        )
    given: dict[str, Any] = {
        "placement": placement,
        "defer_movement": found["movement"],
        "defer_max_age": found["age"],
        "wire_dtype": _WIRES.get(found["wire"]),
        "prefetch": True if found["prefetch"] else None,
    }
    return {**_SKIPS[skip], **{flag: value for flag, value in given.items() if value is not None}}


def plan(names: Sequence[str], placements: Sequence[str], ranks: Sequence[int]) -> list[Case]:
    """Returns the runs of each seed.

    Args:
        names: The names of runs. If empty, the runs in `RUNS`.
        placements: The placements of rows.
        ranks: The numbers of ranks.
    """
    for placement in placements:
        if placement not in RUNS:
            raise app.UsageError(
                f"Invalid --placements: {placement!r}. Expected {', '.join(RUNS)}."
            )
    cases = [ALONE]
    for placement in placements:
        chosen = names or RUNS[placement]
        of_sharded = [name for name in names if _needs_sharded(name)]
        if of_sharded and "sharded" not in placements:
            raise app.UsageError(
                f"Invalid --runs: {of_sharded[0]!r}. Expected it with --placements=sharded."
            )
        for count in ranks:
            for name in dict.fromkeys(("plain", *chosen)):
                flags_of(name, placement)
                if placement == "sharded" or not _needs_sharded(name):
                    cases.append(Case(name, placement, count))
    return cases


def _needs_sharded(name: str) -> bool:
    is_baseline = name.split("_")[0] in BASELINES
    return is_baseline or name.endswith("prefetch")


def all_flags(
    case: Case, data: Mapping[str, str], seed: int, batch: int, extra: Mapping[str, Any]
) -> dict:
    """Returns all flags of slipstream-train except --output.

    Args:
        case: The run.
        data: The flags --data and --settings.
        seed: The seed of the run.
        batch: The global batch size.
        extra: The flags from --train_flag.
    """
    given = common.explicit({**data, "seed": seed, "batch_size": batch // case.ranks})
    if case.ranks == 1:
        return {**given, **extra, **_SKIPS["plain"]}
    return {**given, **_SEVERAL, **extra, **flags_of(case.run, case.placement)}


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Starts the ranks of a run.

    Attributes:
        rate: The rate of each rank's link. None runs the ranks on this host with horovodrun.
        controller: "gloo" or "mpi", for ranks on this host.
        timeout: The timeout of a run in seconds.
    """

    rate: str | None
    controller: str
    timeout: float

    def run(self, ranks: int, arguments: Sequence[str]) -> tuple[int, str, list[int] | None]:
        """Runs slipstream-train.

        Returns:
            The exit code, the output, and the bytes that each rank's host has sent. The bytes are
            None if ranks share a host.

            Note: the kernel counts these bytes. They include evaluation and all headers.
        """
        program = [*common.TRAIN, *arguments]
        if ranks == 1 or self.rate is None:
            command = [sys.executable, *program]
            if ranks > 1:
                command = [*common.horovodrun(ranks, self.controller), *command]
            return (*self._run(command), None)
        with _hosts().Hosts(ranks, rate=self.rate) as hosts:
            ended = hosts.start(program).wait(self.timeout)
            sent = [hosts.sent_bytes(rank) for rank in range(ranks)]
        code = next((rank.code for rank in ended if rank.code), 0)
        return code, "\n".join(rank.output for rank in ended), sent

    def _run(self, command: Sequence[str]) -> tuple[int, str]:
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **common.AS_ROOT, **os.environ}
        process = subprocess.Popen(
            command, env=environment, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            return 1, f"not finished after {self.timeout:g} seconds\n{_stop(process)}"
        finally:
            _stop(process)
        return process.returncode, output


def _stop(process: subprocess.Popen[str]) -> str:
    """Terminates a running process; horovodrun then terminates its ranks."""
    if process.poll() is not None:
        return ""
    process.terminate()
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _hosts() -> ModuleType:
    """Returns tests/parallel/hosts.py, which creates hosts as network namespaces."""
    name = "slipstream_hosts"
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[1] / "tests" / "parallel" / "hosts.py"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.exists():
            raise SystemExit(
                f"{path} does not exist. --rate requires a copy of the sources with tests/."
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def train(launcher: Launcher, ranks: int, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Runs slipstream-train unless the run is finished; returns its record."""
    given = {**common.by_hand(str(given["data"])), **given}
    record, sent_bytes = common.finished(folder, given), folder / "sent_bytes.json"
    if record is None:
        arguments = [f"--{name}={value}" for name, value in given.items()]
        write_json(str(folder / common.FLAGS), given)
        code, output, sent = launcher.run(ranks, [*arguments, f"--output={folder.resolve()}"])
        if code:
            # The output of the ranks precedes the launcher's traceback.
            lines = output.splitlines()
            said = [line for line in lines if line.startswith("[")]
            tail = "\n".join([*said[-10:], *lines[-10:]])
            flag_texts = " ".join(arguments)
            raise SystemExit(
                f"{tail}\nThe run in {folder} failed with exit code {code}. Flags: {flag_texts}"
            )
        if sent is not None:
            write_json(str(sent_bytes), {"sent_bytes": sent})
        record = json.loads((folder / common.RECORD).read_text(encoding="utf-8"))
    if sent_bytes.exists():
        record.update(json.loads(sent_bytes.read_text(encoding="utf-8")))
    return record


def locate(value: str, seed: int = 0) -> tuple[str, dict[str, str]]:
    """Returns the data set's name and the flags that open it."""
    found = common.opened(value, seed)
    try:
        name = train_data.facts_of(found["data"]).name
    except UsageError as error:
        raise app.UsageError(str(error)) from None
    # Simulated hosts share the file system, but have another working folder.
    absolute = {n: os.path.abspath(path) for n, path in found.items() if os.path.exists(path)}
    return name, {**found, **absolute}


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Converts SIGTERM to an exception, so that ranks and hosts are removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check() -> list[int]:
    """Raises UsageError for impossible flags; returns the numbers of ranks."""
    if _RATE.value and _CONTROLLER.value != "gloo":
        raise app.UsageError(
            "Invalid --controller=mpi with --rate. Expected gloo, because simulated hosts use Gloo."
        )
    ranks = common.integers("ranks", _RANKS.value)
    for count in ranks:
        if count < 2 or _BATCH.value % count:
            raise app.UsageError(
                f"Invalid --ranks: {count}. Expected integers >= 2 that divide --global_batch="
                f"{_BATCH.value}."
            )
    if importlib.util.find_spec("horovod") is None:
        raise app.UsageError("Horovod is not installed. Install it: make horovod.")
    reason = _hosts().unavailable() if _RATE.value else None
    if reason is not None:
        raise app.UsageError(f"Invalid --rate={_RATE.value} for this machine: {reason}.")
    return ranks


def write(title: str, trials: Sequence[tuple[Case, int, int, Mapping[str, Any]]]) -> str:
    """Writes a part per placement and number of ranks; returns the page.

    Args:
        title: The data, link and flags of all runs.
        trials: See `network_report.collect`.
    """
    figures, page = network_report.collect(trials), ""
    places = dict.fromkeys((f["placement"], f["ranks"]) for f in figures if f["ranks"] > 1)
    for placement, ranks in places:
        part = f"{title}, {placement}, {ranks} ranks"
        label = re.sub(r"[^a-z0-9.]+", "_", part.removesuffix(" ranks"))
        others = {(ALONE.placement, ALONE.ranks), (placement, ranks)}
        chosen = [f for f in figures if (f["placement"], f["ranks"]) in others]
        results = network_report.results_of(chosen, label, _RATE.value is not None)
        page = summary.write(_page({figure["run"] for figure in figures}), part, *results)
    return page


def _page(runs: Set[str]) -> str:
    """Returns the name of the page for these runs."""
    of_host = "network" if _CONTROLLER.value == "gloo" else "network_shared_memory"
    name = "network_links" if _RATE.value else of_host
    return name if runs.isdisjoint(BASELINES) else f"{name}_baselines"


def main(arguments: Sequence[str]) -> None:
    """Runs missing runs; prints and writes the comparison."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    ranks = check()
    cases = plan(_RUNS.value, _PLACEMENTS.value, ranks)
    seeds = common.integers("seeds", _SEEDS.value)
    opened = {seed: locate(_DATA.value, seed) for seed in seeds}
    name = next(name for name, _ in opened.values())
    extra = common.extra_flags(_EXTRA.value)
    link = _RATE.value or ("unshaped" if _CONTROLLER.value == "gloo" else "shared memory")
    title = ", ".join([name, link, *(f"{k}={v}" for k, v in extra.items())])
    if _MAX_INPUTS.value is not None:
        extra["max_examples"] = _MAX_INPUTS.value
    launcher = Launcher(_RATE.value, _CONTROLLER.value, _TIMEOUT.value)
    base = Path(_RECORDS.value) / name
    # Complete one seed after the other, so that an interrupted program leaves full comparisons.
    # Within a repeat the runs take turns, so that a change of the machine's speed affects all runs.
    turns = [
        (seed, repeat, case) for seed in seeds for repeat in range(_REPEATS.value) for case in cases
    ]
    trials, page = [], ""
    with ends_on_sigterm():
        for number, (seed, repeat, case) in enumerate(turns, 1):
            label = f"{name}, {link}, seed {seed}, repeat {repeat}: {case}"
            print(f"[{number}/{len(turns)}] {label}", flush=True)
            folder = base / f"alone/seed{seed}/repeat{repeat}"
            if case != ALONE:
                of_link = link.replace(" ", "_")
                place = f"{of_link}/{case.placement}_{case.ranks}/seed{seed}/repeat{repeat}"
                folder = base / place / case.run
            given = all_flags(case, opened[seed][1], seed, _BATCH.value, extra)
            record = train(launcher, case.ranks, given, folder)
            trials.append((case, seed, repeat, record))
            if case == cases[-1]:
                page = write(title, trials)
    print(f"\n{page}")


if __name__ == "__main__":
    app.run(main)
