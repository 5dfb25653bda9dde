"""Saves and restores checkpoints of `slipstream-train`.

The folder OUTPUT/checkpoints contains a folder per checkpoint, see `checkpoint.manager`, and
run.json with the settings of the run. A resumed run must have the same settings.
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

from slipstream_tf.cli.data import fingerprint_of
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
_NOT_WRITTEN = "The checkpoint cannot be written: "
# Settings that may change when a run is resumed, because they do not change the results.
_FREE = ("threads", "tensorboard", "trace", "click_rate", "reasons")
# Values of a file's fingerprint that `is_unchanged` compares.
_OF_FILE = ("sample", "modified", "crc32")


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoint settings of a run.

    Attributes:
        output: Output folder of the run, which contains the checkpoints. None means no output.
        every: Steps between checkpoints. 0 means that none are saved.
        keep: Number of newest checkpoints to keep.
        resume: Whether to continue from the newest checkpoint.
        is_elastic: Whether the job is elastic, so that its ranks may change.
    """

    output: str | None
    every: int
    keep: int
    resume: bool
    is_elastic: bool

    @property
    def directory(self) -> Path:
        """Folder of the checkpoints. Requires `output`."""
        assert self.output is not None
        return Path(self.output) / FOLDER

    @property
    def flag(self) -> str:
        """Name of the flag that turns checkpoints on, for messages."""
        return "elastic" if self.is_elastic else "resume" if self.resume else "checkpoint_every"

    @property
    def is_used(self) -> bool:
        """Whether the run saves or restores checkpoints."""
        return self.output is not None and (self.every > 0 or self.resume)


def checkpoint_settings(values: Mapping[str, Any], given: frozenset[str]) -> CheckpointSettings:
    """Returns the checkpoint settings from the flags.

    Args:
        values: Parsed values by flag name.
        given: Names of the flags on the command line.

    Raises:
        UsageError: If a flag has no effect, --elastic lacks a flag, or the output folder contains
            checkpoints and the run does not resume.
    """
    is_elastic = values["elastic"]
    for name in ("output", "checkpoint_every"):
        if is_elastic and not values[name]:
            raise UsageError(
                f"Missing flag --{name} with --elastic: when ranks join or leave, training "
                "continues from the newest checkpoint. Expected --output and --checkpoint_every."
            )
    output, every, resume = (values[name] for name in ("output", "checkpoint_every", "resume"))
    if output is None:
        # Reject only flags on the command line. A settings file may be shared with runs that have
        # an output.
        for name in ("checkpoint_every", "resume"):
            if name in given and values[name]:
                raise does_nothing(name, "--output")
        every, resume = 0, False
    keep = values["keep_checkpoints"]
    # An elastic job always resumes: its processes are restarted whenever the ranks change.
    saving = CheckpointSettings(output, every, keep, resume or is_elastic, is_elastic)
    if "keep_checkpoints" in given and not saving.every:
        raise does_nothing("keep_checkpoints", "--checkpoint_every")
    if saving.output is None or saving.resume:
        return saving
    there = _names(saving.directory)
    if there:
        raise UsageError(
            f"Invalid flag --output={saving.output}: {saving.directory} contains checkpoints of an "
            f"earlier run (newest: {there[0]}). Expected a folder without checkpoints. Pass "
            "--resume to continue the earlier run."
        )
    return saving


def window_steps_of(saving: CheckpointSettings) -> int | None:
    """Returns the window length of the saved run in steps.

    None if there is no saved run, or if its settings have no window length.
    """
    path = saving.directory / RUN
    if not path.exists():
        return None
    return _read(path, saving.flag)["settings"].get("window_steps")


def require_same_run(saving: CheckpointSettings, run: Mapping[str, Any]) -> None:
    """Raises an error if the run to resume has different settings.

    Args:
        saving: The checkpoint settings.
        run: The result of `describe` for this run.

    Raises:
        UsageError: If a flag, the data or the number of ranks differ from the saved run, or
            run.json cannot be read.
    """
    if not saving.resume or not _names(saving.directory):
        return
    path = saving.directory / RUN
    saved = _read(path, saving.flag)
    if saved["ranks"] != run["ranks"] and not saving.is_elastic:
        raise UsageError(
            f"Invalid flag --resume: {path} is from a job with {saved['ranks']} rank(s), but this "
            f"job has {run['ranks']}. Expected {saved['ranks']} rank(s), because each rank "
            "restores its position in the data. Pass --elastic to continue with another number."
        )
    if run["settings"]["data"] == saved["settings"]["data"]:
        _require_same_data(saving, saved["data"], run)
    before, now = _flags(saved["settings"]), _flags(run["settings"])
    chosen = run["settings"].get("reasons", {})
    # Choices follow flags, therefore a flag explains more.
    for name in sorted({*before, *now} - set(_FREE), key=lambda name: (name in chosen, name)):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"Invalid flag --{name}={_shown(now.get(name))} with --{saving.flag}: the run in "
                f"{saving.output} has {_shown(before.get(name))}. Expected that value, or another "
                "--output to train from scratch."
            )


def _require_same_data(
    saving: CheckpointSettings, before: Mapping[str, Any], run: Mapping[str, Any]
) -> None:
    """Raises an error if the data set is not the one of the saved run."""
    from slipstream_tf.data.fingerprints import is_unchanged

    data = run["settings"]["data"]
    changed = [
        f"`{name}` was {_shown(value)} and is {_shown(run['data'].get(name))}"
        for name, value in before.items()
        if name not in _OF_FILE and value != run["data"].get(name)
    ]
    if not changed and os.path.isfile(data) and not is_unchanged(data, before):
        changed = ["the content of the file differs"]
    if changed:
        raise UsageError(
            f"Invalid flag --data={data} with --{saving.flag}: the data set has changed since the "
            f"run in {saving.output} started: {changed[0]}. Expected the same data, or another "
            "--output to train from scratch."
        )


def describe(settings: Settings, spec: Any, ranks: int) -> dict[str, Any]:
    """Returns the JSON-serializable description that a resumed run must match.

    Args:
        settings: The settings of the run.
        spec: The `DataSpec` of the training part.
        ranks: Number of ranks of the job.
    """
    data = {**to_json(dataclasses.asdict(spec)), **fingerprint_of(settings.data)}
    return {"ranks": ranks, "settings": settings.to_dict(), "data": data}


class RunCheckpoints:
    """Saves and restores the state of a training run.

    Does nothing if `saving.is_used` is false. The methods `restore`, `after_step` and `wait` are
    collectives.

    Args:
        saving: The checkpoint settings.
        run: The result of `describe` for this run.
        comm: The communicator of the job.
        model: The compiled and built Keras model.
        store: The store of the embedding rows.
        slipstream: The engine, or None.
        batches: The iterator over this rank's batches.
        counters: Variables that count the examples of this rank.
        elastic: The state of an elastic run, or None.

    Attributes:
        resumed_at: Steps of the checkpoints from which the run was resumed, oldest first.
    """

    def __init__(
        self,
        saving: CheckpointSettings,
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

        from slipstream_tf.distributed import CheckpointManager

        self._saving, self._run, self._comm, self._elastic = saving, run, comm, elastic
        self.resumed_at: list[int] = []
        self._stop_is_requested = False
        self._hashing: threading.Thread | None = None
        if not saving.is_used:
            return
        # Saved per rank: states of random number generators, and metrics.
        states = [v.value for v in model.variables if not v.value.dtype.is_floating]
        states += [v.value for v in model.metrics_variables]
        own = tf.train.Checkpoint(inputs=batches, counters=list(counters), states=states)
        self._saved = CheckpointManager(
            saving.directory,
            tf.train.Checkpoint(model=model, optimizer=model.optimizer),
            comm,
            store,
            max_to_keep=saving.keep,
            engine=slipstream,
            # In an elastic run the state of a rank is useless, because the rank may be gone when
            # the run continues.
            rank_checkpoint=None if elastic is not None else own,
            evict_to_fit=elastic is not None,
        )

    @contextlib.contextmanager
    def catching_sigterm(self) -> Iterator[None]:
        """Turns SIGTERM into a checkpoint after the current step, followed by `StoppedError`.

        Has no effect without periodic checkpoints, outside the main thread (where Python does not
        allow signal handlers), and in a job with multiple ranks, because the ranks would have to
        agree on a step while their launcher kills them.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not self._saving.every or self._comm.size > 1 or not is_main:
            yield
            return

        def request_stop(number: int, frame: FrameType | None) -> None:
            self._stop_is_requested = True

        before = signal.signal(signal.SIGTERM, request_stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def restore(self) -> tuple[int, dict[str, Any] | None]:
        """Restores the newest intact checkpoint if the flags ask for it.

        Returns:
            The number of trained steps and the notes that were passed to `after_step`. Without a
            checkpoint, 0 and None.

        Raises:
            RunError: If there are checkpoints and none can be restored.
        """
        if not self._saving.resume:
            return 0, None
        problem = f"The run cannot continue from {self._saving.directory}. "
        failed = raised_as(RunError, problem, RuntimeError, ValueError)
        with failed, self._comm.uncounted():
            last = self._saved.restore()
            if self._elastic is not None:
                self._elastic.begin(last)
        if last is None:
            self._say(f"no checkpoint in {self._saving.directory}; training starts from scratch")
            return 0, None
        noted = last.position if self._elastic is None else self._elastic.noted
        self.resumed_at = [*noted["resumed_at"], last.step]
        if self._elastic is None:
            self._say(f"training continues from {last.path}, step {last.step:,}")
        return last.step, noted

    def begin(self) -> None:
        """Writes run.json on rank 0 if checkpoints are saved.

        Call it before the first step.
        """
        if self._saving.every and self._comm.rank == 0:
            found = {**self._run["data"], **self._fingerprint()}
            self._write_run(found)
            data = self._run["settings"]["data"]
            if os.path.isfile(data) and "crc32" not in found:
                # Training does not wait for it, and neither does the end of the process.
                self._hashing = threading.Thread(target=self._hash, args=(data, found), daemon=True)
                self._hashing.start()

    def _fingerprint(self) -> dict[str, Any]:
        """Returns the data's fingerprint, with the hash of a file if run.json has it."""
        data, path = self._run["settings"]["data"], self._saving.directory / RUN
        if self.resumed_at and os.path.isfile(data):
            saved = _read(path, self._saving.flag)["data"]
            if saved["modified"] == os.stat(data).st_mtime_ns:
                return {name: saved[name] for name in _OF_FILE if name in saved}
        return fingerprint_of(data, has_time=True)

    def _hash(self, data: str, found: Mapping[str, Any]) -> None:
        """Adds the hash of a file to run.json, unless the file has changed since `begin`."""
        from slipstream_tf.data import fingerprints

        with contextlib.suppress(OSError):  # Without the hash, a touched file counts as changed.
            hashed = fingerprints.crc32(data)
            if fingerprints.is_same(fingerprints.fingerprint(data), found):
                self._write_run({**found, "crc32": hashed})

    def _write_run(self, data: Mapping[str, Any]) -> None:
        write_json(str(self._saving.directory / RUN), {**self._run, "data": data})

    def after_step(self, step: int, notes: Callable[[], Mapping[str, Any]]) -> None:
        """Saves a checkpoint every `saving.every` steps and after SIGTERM.

        Args:
            step: Number of trained steps, including the current one.
            notes: Function that returns additional JSON-serializable state. It must wait until no
                batch is being prepared, because the iterator is saved afterwards.

        Raises:
            StoppedError: If SIGTERM was received. The checkpoint is on disk.
            RunError: If a checkpoint cannot be written.
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
                f"Stopped by SIGTERM after step {step:,}. The checkpoint of this step is in "
                f"{self._saving.directory}. Pass --resume to continue."
            )

    def wait(self) -> None:
        """Waits for checkpoints and, unless SIGTERM was received, for the hash of a file.

        Raises:
            RunError: If a checkpoint cannot be written.
        """
        if self._saving.is_used:
            with raised_as(RunError, _NOT_WRITTEN, OSError):
                self._saved.wait()
        if self._hashing is not None and not self._stop_is_requested:
            self._hashing.join()

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f"slipstream-train --{self._saving.flag}: {text}", flush=True)


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    import_tensorflow()
    from slipstream_tf.checkpoint import writing

    return writing.names(directory)


def _read(path: Path, flag: str) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        return {name: run[name] for name in ("ranks", "settings", "data")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"Invalid flag --{flag}: {path} cannot be read ({error!r}). Expected the JSON file "
            "with the settings of the run that saved the checkpoints. Pass another --output to "
            "train from scratch."
        ) from None


def _flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings by flag name.

    `random_fractions` and `stop_after` are computed from the run of --match, so they are returned
    as "match".
    """
    flags = {**settings, **settings["engine"]}
    del flags["engine"]
    matched = [flags.pop(name, None) for name in ("random_fractions", "stop_after")]
    return {**flags, "match": matched if any(matched) else None}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "no value" if value is None else str(value)
