"""Saves a run of `slipstream-train` every now and then, and goes on from what was saved.

In: a run that is under way. Out: OUTPUT/checkpoints, with `run.json`, which says what the run is,
and a folder per checkpoint; see `distributed.saving`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream_tf.cli.flag_set import RunError, StoppedError, UsageError
from slipstream_tf.cli.quiet import import_tensorflow
from slipstream_tf.cli.stopping import Stop
from slipstream_tf.telemetry.run_record import PhaseClock, to_json, write_json

if TYPE_CHECKING:
    import tensorflow as tf

    from slipstream_tf.cli.counting import StepTimer
    from slipstream_tf.cli.curve import CurveCallback
    from slipstream_tf.cli.settings import Settings
    from slipstream_tf.distributed import Communicator
    from slipstream_tf.keras import Slipstream

FOLDER = "checkpoints"
RUN = "run.json"
# What may differ when a run goes on: it changes no result.
_FREE = ("threads", "tensorboard", "strict")


@dataclasses.dataclass(frozen=True)
class Saving:
    """What the flags say about checkpoints.

    Attributes:
        output: of the run, in which they lie; None: there is none.
        every: steps of the job from one to the next; 0: none are saved.
        keep: so many are kept.
        resume: whether to go on from the newest.
        started: when the program started, by `time.perf_counter`.
    """

    output: str | None = None
    every: int = 0
    keep: int = 3
    resume: bool = False
    started: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def directory(self) -> Path:
        """Folder of the checkpoints."""
        assert self.output is not None
        return Path(self.output) / FOLDER

    @property
    def is_used(self) -> bool:
        """Whether anything is saved or restored."""
        return self.output is not None and (self.every > 0 or self.resume)


def saving_of(values: Mapping[str, Any], given: frozenset[str], started: float) -> Saving:
    """Takes the flags in.

    Args:
        values: by flag, as parsed.
        given: flags that stood on the command line.
        started: see `Saving`.

    Raises:
        UsageError: a flag that does nothing, or checkpoints that would be mixed with others.
    """
    saving = Saving(
        values["output"],
        values["checkpoint_every"],
        values["keep_checkpoints"],
        values["resume"],
        started,
    )
    for name in ("checkpoint_every", "resume"):
        if values[name] and saving.output is None:
            raise UsageError(f"Flag --{name} does nothing here. Allowed: with --output.")
    if "keep_checkpoints" in given and not saving.every:
        raise UsageError(
            "Flag --keep_checkpoints does nothing here. Allowed: with --checkpoint_every."
        )
    if saving.output is None or saving.resume:
        return saving
    there = _names(saving.directory)
    if there:
        raise UsageError(
            f"Invalid flag --output={saving.output}: {saving.directory} has checkpoints of a run, "
            f"the newest of which is {there[0]}. Allowed: --resume, to go on from it; another "
            "folder; or this one without its checkpoints."
        )
    return saving


def require_same_run(saving: Saving, run: Mapping[str, Any]) -> None:
    """Refuses to go on with another run than the one that was saved.

    Args:
        saving: what the flags say.
        run: what `describe` gave.

    Raises:
        UsageError: a flag, the data or the number of ranks differ, or `run.json` cannot be read.
    """
    if not saving.resume or not _names(saving.directory):
        return
    path = saving.directory / RUN
    saved = _read(path)
    remedy = "Allowed: that value, or another --output."
    if saved["ranks"] != run["ranks"]:
        raise UsageError(
            f"Invalid flag --resume: {path} is of {saved['ranks']} rank(s), and this job has "
            f"{run['ranks']}. Allowed: as many ranks, since each one's place in the data is its "
            "own."
        )
    before, now = _flags(saved["settings"]), _flags(run["settings"])
    for name in sorted({*before, *now} - set(_FREE)):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"Invalid flag --{name}={_shown(now.get(name))} with --resume: the run in "
                f"{saving.output} has {_shown(before.get(name))}. {remedy}"
            )
    for name, value in saved["data"].items():
        if value != run["data"].get(name):
            raise UsageError(
                f"Invalid flag --data={run['settings']['data']} with --resume: the data have "
                f"changed since the run in {saving.output} began: {name} was {_shown(value)} and "
                f"is {_shown(run['data'].get(name))}. Allowed: the same data, or another --output."
            )


def describe(settings: Settings, spec: Any, ranks: int) -> dict[str, Any]:
    """Returns what must be the same when a run goes on, JSON-serialisable.

    Args:
        settings: of the run.
        spec: `DataSpec` of its training part.
        ranks: of the job.
    """
    data = to_json(dataclasses.asdict(spec))
    if os.path.isfile(settings.data):
        data["bytes"] = os.path.getsize(settings.data)
    return {"ranks": ranks, "settings": to_json(settings.to_dict()), "data": data}


class RunCheckpoints:
    """Saves a run and restores it; with several ranks all of it is a collective.

    Args:
        saving: what the flags say.
        run: what `describe` gave.
        model: compiled and built.
        slipstream: the engine, or None.
        store: of the embedding rows.
        inputs: the iterator of this rank's batches.
        counters: variables of this rank that count inputs.
        settle: waits until no batch of `inputs` is being made.
        comm: the ranks.
        curve, timer: callbacks, whose notes are saved, too.
        clock: of the run; at work on the phase "training" since `training_since`.
        training_since: by `time.perf_counter`.
    """

    def __init__(
        self,
        saving: Saving,
        run: Mapping[str, Any],
        model: Any,
        slipstream: Slipstream | None,
        store: Any,
        inputs: Any,
        counters: Sequence[tf.Variable],
        settle: Callable[[], None],
        comm: Communicator,
        curve: CurveCallback,
        timer: StepTimer,
        clock: PhaseClock,
        training_since: float,
    ) -> None:
        import tensorflow as tf

        from slipstream_tf.distributed import JobCheckpoints

        self._saving, self._run, self._comm = saving, run, comm
        self._settle = settle
        self._curve, self._timer, self._clock = curve, timer, clock
        self._training_since = training_since
        self._store = store
        self.bytes_before: dict[str, int] = {}
        self.rows_before: dict[str, dict[str, int]] = {}
        self.resumed_at: list[int] = []
        # Random numbers of layers and metrics are each rank's own.
        states = [v.value for v in model.variables if not v.value.dtype.is_floating]
        states += [v.value for v in model.metrics_variables]
        own = tf.train.Checkpoint(inputs=inputs, counters=list(counters), states=states)
        self._saved = JobCheckpoints(
            saving.directory,
            tf.train.Checkpoint(model=model, optimizer=model.optimizer),
            comm,
            store,
            keep=saving.keep,
            engine=slipstream,
            own=own,
        )
        self._wall_before = 0.0
        self._stop = Stop()

    def noticing(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which SIGTERM ends training after a step, with a checkpoint.

        Several ranks would have to agree on that step: their launcher ends them at once.
        """
        if self._saving.every and self._comm.size == 1:
            return self._stop.noticing()
        return contextlib.nullcontext()

    def restore(self) -> int:
        """Goes on from the newest whole checkpoint, if the flags say so and there is one.

        Returns:
            The steps that are trained already.

        Raises:
            RunError: there are checkpoints, and none can be restored.
        """
        if not self._saving.resume:
            return 0
        try:
            with self._comm.uncounted():
                last = self._saved.restore()
        except (RuntimeError, ValueError) as error:
            raise RunError(f"The run cannot go on. {error}") from error
        if last is None:
            self._say(f"no checkpoint in {self._saving.directory}: from the beginning")
            return 0
        told = last.position
        self._curve.restore(told["curve"])
        self._timer.restore(told["timer"])
        for name, seconds in told["seconds"].items():
            self._clock.seconds[name] += seconds
        self._wall_before = told["wall_seconds"]
        self.bytes_before = told["bytes"]
        # Less what restoring itself counts.
        self.rows_before = {
            name: {kind: rows[kind] - now for kind, now in self._rows(name).items()}
            for name, rows in told["gradient_rows"].items()
        }
        self.resumed_at = [*told["resumed_at"], last.step]
        self._say(f"goes on from {last.path}, step {last.step:,}")
        return last.step

    def begin(self) -> None:
        """Says in the folder what run it is of; called before the first `save`."""
        if not self._saving.every:
            return
        if self._comm.rank == 0:
            write_json(str(self._saving.directory / RUN), self._run)

    def after_step(self, step: int) -> None:
        """Saves, if it is time to, or if SIGTERM has come.

        Args:
            step: trained steps of the job, this one included.

        Raises:
            StoppedError: SIGTERM has come, and the checkpoint is on the disk.
            RunError: a checkpoint cannot be written.
        """
        every, stops = self._saving.every, self._stop.is_asked
        if every and (stops or step % every == 0):
            self.save(step)
        if stops:
            self.wait()
            raise StoppedError(
                f"Stopped by SIGTERM after step {step:,}, and saved in {self._saving.directory}. "
                "With --resume it goes on from there."
            )

    def save(self, step: int) -> None:
        """Saves after a step.

        Raises:
            RunError: a checkpoint cannot be written.
        """
        start = time.perf_counter()
        # A batch that is being made is in the iterator, and counted.
        self._settle()
        seconds = dict(self._clock.seconds)
        seconds["training"] += start - self._training_since
        told = {
            "curve": self._curve.state(),
            "timer": self._timer.state(),
            "seconds": seconds,
            "wall_seconds": self._wall_before + start - self._saving.started,
            "bytes": self.bytes_so_far(),
            "gradient_rows": {name: self._rows(name) for name in self._tables()},
            "resumed_at": self.resumed_at,
        }
        try:
            self._saved.save(step, position=told)
        except OSError as error:
            raise RunError(f"A checkpoint was not written: {error}") from error
        self._timer.leave_out(time.perf_counter() - start)

    def wait(self) -> None:
        """Waits until all is on the disk.

        Raises:
            RunError: a checkpoint cannot be written.
        """
        try:
            self._saved.wait()
        except OSError as error:
            raise RunError(f"A checkpoint was not written: {error}") from error

    @property
    def wall_seconds_before(self) -> float:
        """Of the parts of the run before this one, up to their last checkpoints."""
        return self._wall_before

    def bytes_so_far(self) -> dict[str, int]:
        """Returns the bytes that this rank gave to the network, by kind, in all parts."""
        kinds = {kind: int(count) for kind, count in self._comm.traffic().bytes.items()}
        before = self.bytes_before
        return {kind: kinds.get(kind, 0) + before.get(kind, 0) for kind in {**before, **kinds}}

    def _tables(self) -> list[str]:
        return [table.name for table in self._store.tables]

    def _rows(self, table: str) -> dict[str, int]:
        """What became of this rank's gradient rows, in all parts."""
        before = self.rows_before.get(table, {})
        counts = dataclasses.asdict(self._store.update_counts(table))
        # These two are not counted, but are as they are.
        flows = {kind: n for kind, n in counts.items() if not kind.startswith("pending")}
        return {kind: n + before.get(kind, 0) for kind, n in flows.items()}

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f"slipstream-train --resume: {text}", flush=True)


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    import_tensorflow()
    from slipstream_tf.checkpoint import folders

    return folders.names(directory)


def _read(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        return {name: run[name] for name in ("ranks", "settings", "data")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"Invalid flag --resume: {path} cannot be read ({error!r}). It says what run the "
            "checkpoints beside it are of. Allowed: another --output."
        ) from None


def _flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by flag; those that --match gives by that one."""
    flags = {name: value for name, value in settings.items() if name != "engine"}
    flags.update(settings["engine"])
    matched = [flags.pop(name, None) for name in ("random_shares", "stop_after")]
    return {**flags, "match": matched if any(matched) else None}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "no value" if value is None else str(value)
