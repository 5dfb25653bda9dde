"""Two ranks train for hours while one is killed every few minutes.

It supervises `horovodrun -np 2 slipstream-train` with sharded tables of bounded capacity, deferred
gradients and a checkpoint every minute. It kills a random rank with SIGKILL, waits for the job to
end by itself, and restarts it with --resume. It measures kills, seconds to the end and to the first
step after it, repeated steps and the difference of their losses, resident memory and its slope, and
hangs. The summary, a log of every step and a plot are written to --output, which must be empty.

    python benchmarks/soak.py --minutes=120 --kill_every=5 --step_seconds=0.5 --output=runs/soak

A step takes at least --step_seconds, so that idle processor time is available to other programs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import soak_report
import summary
from absl import app, flags

HERE = Path(__file__).resolve().parent


_MINUTES = flags.DEFINE_float(
    "minutes", 120.0, "Minutes of the run, from the first step.", lower_bound=0.1
)
_KILL_EVERY = flags.DEFINE_float("kill_every", 5.0, "Minutes of training between kills.")
_CALM = flags.DEFINE_float(
    "calm_minutes", 30.0, "Minutes without kills at the end, in which memory is measured."
)
_STEP = flags.DEFINE_float("step_seconds", 0.5, "Minimum seconds per step.", lower_bound=0.0)
_CHECKPOINT = flags.DEFINE_integer(
    "checkpoint_every",
    120,
    "Steps between checkpoints. The default is one minute at the default step time.",
)
_SAMPLE = flags.DEFINE_float(
    "sample_seconds", 5.0, "Seconds between samples of memory.", lower_bound=0.1
)
_WARM_UP = flags.DEFINE_float(
    "warm_up_seconds", 90.0, "Seconds after the start of a process before its memory is checked."
)
_FLAT = flags.DEFINE_float("flat_mib_per_hour", 32.0, "Maximum slope of memory in MiB per hour.")
_END = flags.DEFINE_float("end_seconds", 60.0, "Maximum seconds until a job ends after a kill.")
_HANG = flags.DEFINE_float(
    "hang_seconds", 300.0, "Maximum seconds without a step. A longer pause counts as a hang."
)
_DATA = flags.DEFINE_string("data", "generated:20000:2000", "Value of --data of slipstream-train.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the choice of killed ranks and times.")
_TRAIN_FLAG = flags.DEFINE_multi_string("train_flag", [], "Flag name=value of slipstream-train.")

_RANKS = 2
_POLL = 0.5


@dataclasses.dataclass
class Part:
    """One start of the job and its end.

    Times are `time.time()` in seconds.

    Attributes:
        number: The number of the part, from 0.
        started: The start time of the launcher.
        ended: The end time of the launcher.
        seconds_to_first_step: The time from the start to the first step of the slower rank. None if
            there was no step.
        killed_rank: The rank that the supervisor killed, or None.
        killed: The time of the kill.
        seconds_to_exit: The time from the kill to the end of the launcher. None if it did not end
            by itself.
        names_peer: Whether the output names the lost rank.
        is_hang: Whether the job made no progress or did not end, and was killed.
        is_unexpected: Whether the job ended without a kill.
        code: The exit code of the launcher.
    """

    number: int
    started: float
    ended: float = 0.0
    seconds_to_first_step: float | None = None
    killed_rank: int | None = None
    killed: float | None = None
    seconds_to_exit: float | None = None
    names_peer: bool = False
    is_hang: bool = False
    is_unexpected: bool = False
    code: int | None = None


class Soak:
    """Starts the job, samples its memory, kills ranks and restarts the job.

    Args:
        output: An existing folder.
    """

    def __init__(self, output: Path) -> None:
        self._output, self._notes = output, output / "notes"
        self._random = random.Random(_SEED.value)
        self._end = math.inf  # Set at the first step.
        self.parts: list[Part] = []
        self.memory: list[dict[str, Any]] = []

    def run(self) -> dict[str, bool]:
        """Runs until the end; returns the verdicts."""
        verdicts: dict[str, bool] = {}
        while time.time() < self._end:
            part = Part(len(self.parts), time.time())
            self.parts.append(part)
            self._notes_of(part).mkdir(parents=True)
            log = self._output / f"part-{part.number:03d}.log"
            with open(log, "w", encoding="utf-8") as file:
                job = subprocess.Popen(
                    self._command(part),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    self._watch(job, part)
                finally:
                    _end_all(job, [process["pid"] for process in self._processes(part)])
            part.ended, part.code = time.time(), job.returncode
            if part.killed_rank is not None:
                lost = f" has lost rank {part.killed_rank} "
                part.names_peer = lost in log.read_text(encoding="utf-8", errors="replace")
            print(f"part {part.number}: {dataclasses.asdict(part)}", flush=True)
            verdicts = self._write()
            if part.is_unexpected and part.seconds_to_first_step is None:
                raise SystemExit(f"The job ended before its first step. Its output is in {log}.")
        return verdicts

    def _notes_of(self, part: Part) -> Path:
        return self._notes / f"part-{part.number:03d}"

    def _command(self, part: Part) -> list[str]:
        launch = common.horovodrun(_RANKS, "gloo")
        program = [sys.executable, str(HERE / "soak_rank.py"), str(self._notes_of(part))]
        program.append(str(_STEP.value))
        given = [flag if flag.startswith("--") else f"--{flag}" for flag in _TRAIN_FLAG.value]
        return [
            *launch, *program, f"--data={_DATA.value}", "--epochs=1000000", "--batch_size=128",
            "--dim=8", "--mlp=16", "--bottom=16", "--threads=1", "--placement=sharded",
            "--policies=defer_gradients", "--defer_movement=0.01",
            "--window_steps=50", "--warmup_steps=50",
            "--capacity=500", "--eviction=lfu", f"--checkpoint_every={_CHECKPOINT.value}",
            f"--output={self._output / 'run'}", "--resume", *given,
        ]  # fmt: skip

    def _watch(self, job: subprocess.Popen[bytes], part: Part) -> None:
        """Samples memory and kills a rank; returns at the job's end."""
        next_sample, due, last_step = 0.0, None, time.time()
        while job.poll() is None:
            time.sleep(_POLL)
            now = time.time()
            processes = self._processes(part)
            steps = [process["steps"][-1]["time"] for process in processes if process["steps"]]
            last_step = max([last_step, *steps])
            if len(steps) == _RANKS and part.seconds_to_first_step is None:
                first = max(process["steps"][0]["time"] for process in processes)
                part.seconds_to_first_step = first - part.started
                self._end = min(self._end, first + 60 * _MINUTES.value)
                due = now + 60 * _KILL_EVERY.value * self._random.uniform(0.7, 1.3)
            if now >= next_sample:
                next_sample = now + _SAMPLE.value
                self._sample(processes, now)
            if part.killed is not None:
                if now - part.killed > _END.value:
                    part.is_hang = True
                    return
            elif now >= self._end and due is not None:
                return
            elif now - last_step > _HANG.value:
                part.is_hang = True
                return
            elif due is not None and due <= now < self._end - 60 * _CALM.value:
                chosen = self._random.choice(processes)
                os.kill(chosen["pid"], signal.SIGKILL)
                part.killed_rank, part.killed = chosen["rank"], now
        if part.killed is not None:
            part.seconds_to_exit = time.time() - part.killed
        else:
            part.is_unexpected = True

    def _processes(self, part: Part) -> list[dict[str, Any]]:
        return soak_report.read_notes(self._notes_of(part))

    def _sample(self, processes: Sequence[dict[str, Any]], now: float) -> None:
        for process in processes:
            size = _resident_bytes(process["pid"])
            if size is not None:
                sample = {"pid": process["pid"], "rank": process["rank"], "time": now}
                self.memory.append({**sample, "bytes": size})

    def _write(self) -> dict[str, bool]:
        """Writes the summary so far; returns the verdicts."""
        notes = soak_report.read_notes(self._notes)
        events = [dataclasses.asdict(part) for part in self.parts]
        found = soak_report.summarise(notes, events, self.memory, _WARM_UP.value, _FLAT.value)
        part = f"{_RANKS} ranks, a step at least {_STEP.value:g} s"
        print(summary.write("soak", part, *soak_report.results_of(found, _FLAT.value)))
        soak_report.plot(notes, self.memory, self._output / "soak.png")
        return found["verdicts"]


def _resident_bytes(pid: int) -> int | None:
    """Returns the resident memory of a process; None if ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    size = int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return size or None


def _end_all(job: subprocess.Popen[bytes], ranks: Sequence[int]) -> None:
    """Kills the launcher and the ranks, if they are still running."""
    for pid in ranks:
        if f"{HERE / 'soak_rank.py'}".encode() in _command_line(pid):
            os.kill(pid, signal.SIGKILL)
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def main(arguments: Sequence[str]) -> None:
    """Runs the soak test."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    output = summary.output().resolve()
    if output.exists() and any(output.iterdir()):
        raise app.UsageError(
            f"Invalid --output={output}: it is not empty. Expected an empty folder."
        )
    output.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if all(Soak(output).run().values()) else 1)


if __name__ == "__main__":
    flags.FLAGS.set_default("output", "runs/soak")
    app.run(main)
