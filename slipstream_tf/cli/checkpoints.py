"""Saves a run of `slipstream-train` every now and then, and goes on from what was saved.

In: a run that is under way. Out: OUTPUT/checkpoints, with `run.json`, which says what the run is,
and a folder per checkpoint; see `checkpoint.manager`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from slipstream_tf.cli.flag_set import RunError, StoppedError, UsageError, does_nothing, raised_as
from slipstream_tf.cli.program import import_tensorflow
from slipstream_tf.telemetry.run_record import to_json, write_json

if TYPE_CHECKING:
    import tensorflow as tf

    from slipstream_tf.cli.settings import Settings
    from slipstream_tf.cli.totals import ElasticRun
    from slipstream_tf.distributed import Communicator
    from slipstream_tf.keras import Slipstream

FOLDER = "checkpoints"
RUN = "run.json"
_NOT_WRITTEN = "A checkpoint was not written: "
# What may differ when a run goes on: it changes no result.
_FREE = ("threads", "tensorboard", "trace")


@dataclasses.dataclass(frozen=True)
class Saving:
    """What the flags say about checkpoints.

    Attributes:
        output: of the run, in which they lie; None: there is none.
        every: steps of the job from one to the next; 0: none are saved.
        keep: so many are kept.
        resume: whether to go on from the newest.
        is_elastic: whether ranks come and go meanwhile.
    """

    output: str | None
    every: int
    keep: int
    resume: bool
    is_elastic: bool

    @property
    def directory(self) -> Path:
        """Folder of the checkpoints."""
        assert self.output is not None
        return Path(self.output) / FOLDER

    @property
    def is_used(self) -> bool:
        """Whether anything is saved or restored."""
        return self.output is not None and (self.every > 0 or self.resume)


def saving_of(values: Mapping[str, Any], given: frozenset[str]) -> Saving:
    """Takes the flags in.

    Args:
        values: by flag, as parsed.
        given: flags that stood on the command line.

    Raises:
        UsageError: a flag that does nothing, or checkpoints that would be mixed with others.
    """
    is_elastic = values["elastic"]
    for name in ("output", "checkpoint_every"):
        if is_elastic and not values[name]:
            raise UsageError(
                f"Missing flag --{name} with --elastic: when ranks change, training goes on from "
                "the newest checkpoint."
            )
    output, every, resume = (values[name] for name in ("output", "checkpoint_every", "resume"))
    # A rank that joins an elastic job resumes; so do all ranks of a job that is started again.
    if output is None:
        # A settings file may serve runs without an output, too.
        for name in given & {"checkpoint_every", "resume"}:
            if values[name]:
                raise does_nothing(name, "--output")
        every, resume = 0, False
    keep = values["keep_checkpoints"]
    saving = Saving(output, every, keep, resume or is_elastic, is_elastic)
    if "keep_checkpoints" in given and not saving.every:
        raise does_nothing("keep_checkpoints", "--checkpoint_every")
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


def window_steps_of(saving: Saving) -> int | None:
    """Returns the steps of a window of the run that was saved; None: there is none yet."""
    path = saving.directory / RUN
    return _read(path)["settings"].get("window_steps") if path.exists() else None


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
    if saved["ranks"] != run["ranks"] and not saving.is_elastic:
        raise UsageError(
            f"Invalid flag --resume: {path} is of {saved['ranks']} rank(s), and this job has "
            f"{run['ranks']}. Allowed: as many ranks, since each one's position in the data is its "
            "own."
        )
    before, now = _flags(saved["settings"]), _flags(run["settings"])
    for name in sorted({*before, *now} - set(_FREE)):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"Invalid flag --{name}={_shown(now.get(name))} with --resume: the run in "
                f"{saving.output} has {_shown(before.get(name))}. Allowed: that value, or another "
                "--output."
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
    return {"ranks": ranks, "settings": settings.to_dict(), "data": data}


class RunCheckpoints:
    """Saves a run and restores it, if the flags say so; with several ranks it is a collective.

    Args:
        saving: what the flags say.
        run: what `describe` gave.
        comm: the ranks.
        model: compiled and built.
        store: of the embedding rows.
        slipstream: the engine, or None.
        batches: the iterator of this rank's batches.
        counters: variables of this rank that count inputs.
        elastic: of a run whose ranks come and go; else None.

    Attributes:
        resumed_at: steps after which the run was gone on with.
    """

    def __init__(
        self,
        saving: Saving,
        run: Mapping[str, Any],
        comm: Communicator,
        model: Any,
        store: Any,
        slipstream: Slipstream | None,
        batches: Any,
        counters: Sequence[tf.Variable],
        elastic: ElasticRun | None = None,
    ) -> None:
        import tensorflow as tf

        from slipstream_tf.distributed import JobCheckpoints

        self._saving, self._run, self._comm, self._elastic = saving, run, comm, elastic
        self.resumed_at: list[int] = []
        self._stop_is_requested = False
        if not saving.is_used:
            return
        # Random numbers of layers and metrics are each rank's own.
        states = [v.value for v in model.variables if not v.value.dtype.is_floating]
        states += [v.value for v in model.metrics_variables]
        own = tf.train.Checkpoint(inputs=batches, counters=list(counters), states=states)
        self._saved = JobCheckpoints(
            saving.directory,
            tf.train.Checkpoint(model=model, optimizer=model.optimizer),
            comm,
            store,
            keep=saving.keep,
            engine=slipstream,
            # Of an elastic run, nothing is one rank's: it may be gone.
            own=None if elastic is not None else own,
            evicts=elastic is not None,
        )

    @contextlib.contextmanager
    def noticing(self) -> Iterator[None]:
        """Makes SIGTERM end training after a step, with a checkpoint, instead of the process.

        Several ranks would have to agree on that step: their launcher ends them at once. Beside the
        main thread there are no signals.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not self._saving.every or self._comm.size > 1 or not is_main:
            yield
            return

        def note_stop(number: int, frame: FrameType | None) -> None:
            self._stop_is_requested = True

        before = signal.signal(signal.SIGTERM, note_stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def restore(self) -> tuple[int, dict[str, Any] | None]:
        """Goes on from the newest whole checkpoint, if the flags say so and there is one.

        Returns:
            The steps that are trained already, and the notes that `after_step` was given then; 0
            and None from the beginning.

        Raises:
            RunError: there are checkpoints, and none can be restored.
        """
        if not self._saving.resume:
            return 0, None
        cause = (RuntimeError, ValueError)
        with raised_as(RunError, "The run cannot go on. ", *cause), self._comm.uncounted():
            last = self._saved.restore()
            if self._elastic is not None:
                self._elastic.begin(last)
        if last is None:
            self._say(f"no checkpoint in {self._saving.directory}: from the beginning")
            return 0, None
        noted = last.position if self._elastic is None else self._elastic.noted
        self.resumed_at = [*noted["resumed_at"], last.step]
        if self._elastic is None:
            self._say(f"goes on from {last.path}, step {last.step:,}")
        return last.step, noted

    def begin(self) -> None:
        """Says in the folder what run it is of; called before the first step."""
        if self._saving.every and self._comm.rank == 0:
            write_json(str(self._saving.directory / RUN), self._run)

    def after_step(self, step: int, notes: Callable[[], Mapping[str, Any]]) -> None:
        """Saves, if it is time to, or if SIGTERM has come.

        Args:
            step: trained steps of the job, this one included.
            notes: gives what is saved beside, JSON-serialisable; afterwards no batch is being made.

        Raises:
            StoppedError: SIGTERM has come, and the checkpoint is on the disk.
            RunError: a checkpoint cannot be written.
        """
        every, stops = self._saving.every, self._stop_is_requested
        if every and (stops or step % every == 0):
            with raised_as(RunError, _NOT_WRITTEN, OSError):
                self._saved.save(step, position={**notes(), "resumed_at": self.resumed_at})
            if self._elastic is not None:
                self._elastic.job.committed(self._saved)
        if stops:
            self.wait()
            raise StoppedError(
                f"Stopped by SIGTERM after step {step:,}, and saved in {self._saving.directory}. "
                "With --resume it goes on from there."
            )

    def wait(self) -> None:
        """Waits until all is on the disk.

        Raises:
            RunError: a checkpoint cannot be written.
        """
        if self._saving.is_used:
            with raised_as(RunError, _NOT_WRITTEN, OSError):
                self._saved.wait()

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            flag = "elastic" if self._saving.is_elastic else "resume"
            print(f"slipstream-train --{flag}: {text}", flush=True)


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    import_tensorflow()
    from slipstream_tf.checkpoint import writing

    return writing.names(directory)


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
    flags = {**settings, **settings["engine"]}
    del flags["engine"]
    matched = [flags.pop(name, None) for name in ("random_shares", "stop_after")]
    return {**flags, "match": matched if any(matched) else None}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "no value" if value is None else str(value)
