"""Runs a training from `Settings` to the content of metrics.json."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf._utils.agreement import require_same
from slipstream_tf.baselines.hot_rows import HotRows
from slipstream_tf.baselines.segregation import profile_hot_keys
from slipstream_tf.cli import build, totals
from slipstream_tf.cli.callbacks import (
    BarCallback,
    CurveCallback,
    StepCount,
    StepTimer,
    Validation,
)
from slipstream_tf.cli.checkpoints import (
    CheckpointSettings,
    RunCheckpoints,
    describe,
    require_same_run,
)
from slipstream_tf.cli.data import Parts, best_auc
from slipstream_tf.cli.flag_set import RunError, UsageError, raised_as
from slipstream_tf.cli.pipeline import TrainingInputs, batches_of_rank, inputs_of_rank
from slipstream_tf.cli.program import agreed
from slipstream_tf.cli.settings import Settings
from slipstream_tf.cli.tracing import TraceCallback
from slipstream_tf.config import HotSet
from slipstream_tf.data.spec import Reader
from slipstream_tf.distributed import Communicator, pad_to_equal_steps
from slipstream_tf.distributed.batches import no_inputs
from slipstream_tf.distributed.elastic import BlocksLeft, ElasticJob
from slipstream_tf.distributed.watch import is_of_collective
from slipstream_tf.engine.hot_set import snapshot_bytes
from slipstream_tf.export import saved_model
from slipstream_tf.export.columns import RawColumns, has_schema
from slipstream_tf.export.saved import flat_specs, resolve
from slipstream_tf.keras import RanksCallback
from slipstream_tf.telemetry.metrics import ClickMetrics
from slipstream_tf.telemetry.progress import TrainingBar
from slipstream_tf.telemetry.run_record import SCHEMA, PhaseClock, machine, versions
from slipstream_tf.telemetry.savings_report import SavingsReport

# Start of an error of the Python API, and the flags that set the argument.
_FLAGS_OF = {
    r"Invalid `(policies|wire_dtype)`": r"Invalid flag --\1",
    r"Invalid Table: (?=.*\bspill\b)": "Invalid flag --spill: ",
    r"Invalid `memory`(?=.* for HotSet)": "Invalid flag --hot_set_memory",
    r"Invalid `fraction`(?=.* policies )": "Invalid flags --skip_fraction and --mask_fraction",
}


class Trainer:
    """Trains and evaluates a model and returns the record of the run.

    Call each method once, in this order: `open`, `build`, `fit`, `evaluate`, `record`, and
    optionally `export`. In a job with multiple ranks, every method is a collective.

    Args:
        settings: The settings of the run, the same on all ranks.
        parts: The data readers. Every rank reads all examples and trains a part.
        clock: Clock that measures the time per phase. It already contains the time to open the
            data.
        comm: The communicator of the job. Rank 0 shows progress.
        saving: The checkpoint settings.
        job: The elastic job. None if the ranks of the job do not change.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        clock: PhaseClock,
        comm: Communicator,
        saving: CheckpointSettings,
        job: ElasticJob | None = None,
    ) -> None:
        self._settings, self._parts, self._clock, self._comm = settings, parts, clock, comm
        self._saving, self._job = saving, job
        self._planned = build.planned_inputs(settings, parts.num_examples)
        self._report: SavingsReport | None = None
        of_job = settings, parts.num_examples, comm.size
        self._planned_steps = build.planned_steps(*of_job)
        self._validation_steps = 0
        if settings.early_stopping:
            with agreed(comm, "validation"):
                self._validation_steps = build.validation_steps(*of_job)
        self._count = StepCount()
        untimed = build.steps_before_skipping(settings, self._planned_steps)
        self._timer = StepTimer(self._count, untimed)
        self._saved_run = describe(settings, parts.train.spec, comm.size)
        self._hot_keys: list[Any] | None = None

    def open(self) -> None:
        """Sets the seed, checks that all ranks agree, and finds hot keys.

        Only the baselines (a `schedule` other than "plain") need hot keys, the most accessed keys.

        Raises:
            UsageError: If flags or data of the ranks differ from each other or from the checkpoint
                to resume, or if a baseline cannot train on the data: it needs a key matrix.
            AgreedError: The same, on all ranks, if there are multiple ranks.
        """
        settings, comm = self._settings, self._comm
        # The seed differs per rank so that each rank has different dropout masks. The initial
        # weights are the same, because rank 0 broadcasts them.
        keras.utils.set_random_seed(settings.seed + comm.rank)
        # Ranks with different flags or data would run different collectives and wait forever.
        run = {name: self._saved_run[name] for name in ("settings", "data")}
        try:
            require_same(comm, run, "slipstream.run", "slipstream-train")
        except ValueError as error:  # `require_same` raises on all ranks.
            with agreed(comm, "run"):
                text = re.sub(r": settings\.(engine\.)?", ": --", str(error), count=1)
                named = re.search(r": data\.([\w[\]]+) is", text)
                if named is not None:
                    now = f": `{named[1]}` of --data={settings.data} is"
                    text = text.replace(named[0], now, 1)
                raise UsageError(text) from None
        if self._saving.is_used:
            with agreed(comm, "resume"):
                require_same_run(self._saving, self._saved_run)
        with self._clock.phase("reading"), agreed(comm, "hot_keys"):
            if settings.schedule != "plain":
                budget = HotSet(settings.engine.get("hot_set_memory", HotSet.memory)).memory_bytes
                bytes_per_key = snapshot_bytes(settings.dim)
                problem = f"Invalid flag --schedule={settings.schedule} for {settings.data}. "
                with raised_as(UsageError, problem, ValueError):
                    dataset = self._parts.train.dataset()
                    self._hot_keys = profile_hot_keys(dataset, budget, bytes_per_key)

    def build(self) -> None:
        """Creates the tables, the model, the engine and the training batches.

        Raises:
            UsageError: If the settings do not fit together or do not fit the data.
            AgreedError: The same, on all ranks, if there are multiple ranks.
        """
        settings, comm, spec = self._settings, self._comm, self._parts.train.spec
        steps = self._planned_steps
        with self._clock.phase("training"):
            with agreed(comm, "build"), _flags_named():
                self._embeddings = build.build_embeddings(
                    settings, spec.features, comm, steps, self._hot_keys
                )
                self._model = build.build_model(
                    settings, self._embeddings, spec.num_dense, comm, spec.scales
                )
                self._slipstream = build.build_engine(settings, self._embeddings, steps)
            self._elastic: totals.ElasticRun | None = None
            if self._job is not None:
                self._elastic = totals.ElasticRun(self._job, self._saving.directory)
            dataset, engine = self._parts.train.dataset(), self._slipstream
            hot_keys = self._hot_keys if settings.schedule == "fae" else None
            left = BlocksLeft() if self._elastic is None else self._elastic.left
            self._inputs = TrainingInputs(
                settings, dataset, comm, self._embeddings, engine, hot_keys, left
            )
            model = self._model
            self._predict = tf.function(
                lambda features: model(features, training=False),
                autograph=False,
                reduce_retracing=True,
            )
            self._test = self._measured_part(self._parts.test)
            self._exchanged = totals.Exchanged(self._stores, comm)
            every = settings.evaluate_every
            self._validation: Validation | None = None
            if settings.early_stopping:
                assert self._parts.valid is not None
                valid, every = self._measured_part(self._parts.valid), None
                measure = functools.partial(self._measured, valid, "validation")
                steps_between, exclude_seconds = self._validation_steps, self._exclude_seconds
                self._validation = Validation(
                    self._count, settings, measure, steps_between, exclude_seconds
                )
            measure, exclude_seconds = (
                functools.partial(self._measured, self._test),
                self._timer.exclude,
            )
            self._curve = CurveCallback(
                self._count, self._inputs_pulled, measure, every, exclude_seconds
            )

    def fit(self, callbacks: Sequence[Any] = ()) -> None:
        """Trains the model, optionally from the newest checkpoint, and collects the counts.

        Args:
            callbacks: Additional Keras callbacks, called after the callbacks of the program.

        Raises:
            RunError: If training fails, or the counts of read, trained and skipped examples do not
                add up.
        """
        with self._clock.phase("training"):
            own = None
            if self._planned is not None:
                size = self._settings.read_batch_size
                own = inputs_of_rank(self._planned, size, self._comm)
            with TrainingBar(own, self._title(), self._comm.rank == 0) as bar:
                batches = iter(self._inputs.dataset)
                with self._comm.uncounted():
                    _build_variables(self._model, self._inputs.dataset.element_spec)
                counters = (self._inputs.read, self._inputs.seen, self._inputs.pulled)
                self._saved = RunCheckpoints(
                    self._saving, self._saved_run, self._comm, self._model,
                    self._embeddings.store, self._slipstream, batches, counters, self._elastic,
                )  # fmt: skip
                with self._saved.catching_sigterm():
                    self._fit(batches, bar, callbacks)
        self._clock.move(self._curve.evaluation_seconds, "training", "evaluation")
        self._windows: list[dict[str, Any]] = []
        skipped = 0
        if self._slipstream is not None:
            # End the last, partial window, so that its examples are in a report, too.
            self._slipstream.end_window()
            all_reports = self._slipstream.tracker.reports
            reports = [report for report in all_reports if report.examples_seen]
            self._windows = [report.to_dict() for report in reports]
            skipped = sum(report.examples_skipped for report in reports)
            self._report = self._slipstream.report()
            self._clock.move(sum(r.seconds for r in all_reports), "training", "window_ends")
        self._traffic = self._exchanged.traffic()
        self._training = totals.total_metrics(self._model, self._comm)
        self._account = {
            "seen": totals.total(self._comm, int(self._inputs.seen.numpy()), "seen"),
            "trained": self._training.pop("trained"),
            "skipped": skipped,
        }
        if self._elastic is not None:
            self._account["lost"] = self._elastic.lost
        if self._is_stopped:
            # Do not count examples that were read ahead when early stopping ended the run.
            self._account["seen"] = self._account["trained"] + skipped
        else:
            _check_account(self._account, int(self._inputs.read.numpy()))

    def evaluate(self) -> None:
        """Evaluates the model on the part `evaluate_on`.

        Raises:
            RunError: If the metrics are undefined.
        """
        with self._clock.phase("evaluation"):
            part = {"valid": "validation"}.get(self._settings.evaluate_on, "test")
            self._quality = totals.evaluate(self._predict, self._test, self._comm, part)
        self._not_learned = self._quality.no_learning_reason(part)
        report = self._report
        if report is not None and report.dry_run is not None:
            estimate = report.dry_run.refused(self._not_learned)
            self._report = dataclasses.replace(report, dry_run=estimate)

    def record(self) -> dict[str, Any]:
        """Returns the JSON-serializable content of metrics.json.

        Counts are sums over all ranks. Seconds and the machine description are from this rank.
        """
        train, inputs, clock = self._parts.train, self._account, self._clock
        return {
            "schema": SCHEMA,
            "data": train.spec.name,
            "test": self._quality.to_dict(),
            "training": self._training,
            **self._curve.entries(self._comm, self._quality, inputs),
            **self._validated(),
            "examples": {**inputs, "bad_lines": train.bad_lines.count, "planned": self._planned},
            "test_bad_lines": self._parts.test.bad_lines.count,
            "row_lookups": _row_lookups(train, inputs["trained"]),
            "rows": self._rows(),
            "gradient_rows": self._exchanged.gradient_rows(),
            "ranks": self._traffic,
            "seconds": {**clock.seconds, "total": sum(clock.seconds.values())},
            "resumed_at": self._saved.resumed_at,
            "changes_of_ranks": None if self._elastic is None else self._elastic.changes,
            "wall_seconds": clock.wall_seconds,
            "seconds_per_step_after_warmup": self._timer.seconds_per_step,
            "windows": self._windows,
            "report": "" if self._report is None else str(self._report),
            "dry_run": None if self._report is None else self._report.to_dict()["dry_run"],
            "not_learned": self._not_learned,
            "engine": None if self._slipstream is None else self._slipstream.settings.get_config(),
            "settings": self._settings.to_dict(),
            "versions": versions(),
            "machine": machine(),
        }

    def export(self, path: str) -> str:
        """Exports the model as a SavedModel that returns probabilities.

        If the data was prepared with a schema, the inputs are the columns of the original files.
        Call it last, because the model then returns probabilities instead of logits.

        Args:
            path: Folder of the SavedModel.

        Returns:
            A sentence that names the inputs of the SavedModel.

        Raises:
            RunError: If the SavedModel cannot be written.
        """
        model, data = self._model, self._settings.data
        model.returns_logits = False
        problem = f"The SavedModel of --export={path} cannot be written: "
        with raised_as(RunError, problem, Exception):
            inputs = export_inputs(data) or flat_specs(resolve(model, None))
            saved_model(model, path, prepared=data if has_schema(data) else None)
        listed = ", ".join(f"{name} ({spec.dtype.name})" for name, spec in inputs.items())
        return f"Wrote the SavedModel {path} with the inputs {listed}."

    def _inputs_pulled(self) -> int:
        return int(self._inputs.pulled.numpy())

    def _measured_part(self, reader: Reader) -> tf.data.Dataset:
        """Returns this rank's batches of an evaluated part."""
        own = batches_of_rank(reader.dataset(), self._comm)
        # A lookup of sharded rows is a collective, so all ranks need the same number of batches.
        return pad_to_equal_steps(own, self._comm) if self._settings.placement == "sharded" else own

    def _measured(self, dataset: tf.data.Dataset, part: str = "test") -> ClickMetrics:
        with self._comm.uncounted():
            if part == "validation":
                # Early stopping may restore these weights and rows later. Apply all deferred
                # gradients first, so that they are consistent.
                self._embeddings.store.flush()
            return totals.evaluate(self._predict, dataset, self._comm, part)

    def _exclude_seconds(self, seconds: float) -> None:
        """Counts seconds in callbacks as evaluation time, not as training time."""
        self._timer.exclude(seconds)
        self._curve.evaluation_seconds += seconds

    def _callbacks(self, bar: TrainingBar) -> list[Any]:
        """Returns the callbacks of the program in call order."""
        engine = self._slipstream
        found: list[Any] = [self._count]
        if self._comm.rank == 0:
            found.append(BarCallback(bar, None if engine is None else self._inputs_pulled))
        if engine is None:
            found.append(RanksCallback(self._comm, self._embeddings.store))
        else:
            found.append(engine.callback(self._settings.tensorboard))
        if self._validation is not None:
            found.append(self._validation)
        found += [self._curve, self._timer]
        trace = self._settings.trace
        return found if trace is None else [*found, TraceCallback(self._count, self._comm, trace)]

    def _fit(self, batches: Any, bar: TrainingBar, callbacks: Sequence[Any]) -> None:
        """Runs the loop of `model.fit` over a checkpointable iterator."""
        model = self._model
        listed = keras.callbacks.CallbackList(
            [*self._callbacks(bar), *callbacks], model=model, epochs=1, steps=None, verbose=0
        )
        model.stop_training, self._is_stopped = False, True
        # Additional callbacks may need every step, so group steps only without them.
        if not callbacks:
            ends = (self._validation_steps, self._saving.every)
            model.steps_per_execution = build.steps_per_execution(self._settings, *ends)
        model.make_train_function()
        try:
            listed.on_train_begin()
            model.reset_metrics()
            listed.on_epoch_begin(0)
            # Restore after `on_train_begin`, because its callbacks flush deferred gradients.
            # Restored deferred gradients must stay deferred.
            self._count.steps = self._go_on()
            while not model.stop_training:
                step = self._count.steps
                listed.on_train_batch_begin(step)
                try:
                    with tf.profiler.experimental.Trace("slipstream steps"):
                        logs = model.train_function(batches)
                except (tf.errors.OutOfRangeError, StopIteration):
                    self._is_stopped = False
                    break
                with tf.profiler.experimental.Trace("slipstream callbacks"):
                    listed.on_train_batch_end(step, logs)
                start = time.perf_counter()
                self._saved.after_step(self._count.steps, self._notes)
                self._timer.exclude(time.perf_counter() - start)
            self._saved.wait()
            if not self._count.steps:
                raise RunError(
                    f"The training part of --data={self._settings.data} has no examples. Expected "
                    "at least one example."
                )
            logs = dict(model.get_metrics_result())
            listed.on_epoch_end(0, logs)
            listed.on_train_end(logs)
        except tf.errors.OpError as error:
            if self._job is not None and is_of_collective(error):
                raise  # The elastic job continues with the remaining ranks.
            raise RunError(f"Training failed: {_cause(error)}") from None

    def _go_on(self) -> int:
        """Restores the newest checkpoint if requested and returns its number of steps."""
        step, notes = self._saved.restore()
        if self._elastic is not None and notes is not None:
            self._elastic.restore(self._inputs, self._model, self._slipstream)
        if notes is not None:
            self._curve.restore(notes["curve"])
            self._timer.restore(notes["timer"])
            self._clock.restore(notes)
            self._exchanged.restore(notes)
        self._saved.begin()
        return step

    def _notes(self) -> dict[str, Any]:
        """Returns the JSON-serializable state for a checkpoint that TensorFlow does not save."""
        clock = self._clock.state()
        # Wait for the batch that is being prepared. The iterator then contains it, and the counters
        # include its examples.
        self._inputs.wait_until_idle()
        notes = {"curve": self._curve.state(), "timer": self._timer.state()}
        if self._elastic is not None:
            notes.update(self._elastic.notes(self._inputs, self._model, self._count.steps))
        return {**notes, **clock, **self._exchanged.state()}

    def _validated(self) -> dict[str, Any]:
        """Returns the validation results and the best reachable AUC for the record."""
        found: dict[str, Any] = {"evaluated_on": self._settings.evaluate_on}
        if (best := best_auc(self._parts.test)) is not None:
            found["best_auc"] = best
        if self._validation is not None:
            found.update(validation=self._validation.measured, best_step=self._validation.best_step)
        return found

    def _rows(self) -> dict[str, int]:
        """Returns the number of rows per table, summed over stores and shards."""
        rows = dict.fromkeys((table.name for table in self._embeddings.tables), 0)
        for store in self._stores:
            for name in rows:
                own = store.size(name)
                rows[name] += (
                    totals.total(self._comm, own, f"rows.{name}") if store.is_spread else own
                )
        return rows

    @property
    def _stores(self) -> list[Any]:
        """The stores of the embedding rows; each store contains all tables."""
        layer = self._embeddings
        return [layer.store, layer.hot.store] if isinstance(layer, HotRows) else [layer.store]

    def _title(self) -> str:
        settings, comm = self._settings, self._comm
        title = "plain" if settings.control == "none" else settings.control
        if settings.policies:
            title = f"{'dry run, ' if settings.dry_run else ''}{' '.join(settings.policies)}"
        return title if comm.size == 1 else f"{title}, rank {comm.rank} of {comm.size}"


def export_inputs(data: str) -> dict[str, tf.TensorSpec] | None:
    """Returns the inputs of a SavedModel by name if they are the columns of the original files.

    Args:
        data: Value of --data.

    Returns:
        The specs, or None if the data was not prepared with a schema.

    Raises:
        OSError: If the manifest cannot be read.
        ValueError: If the manifest is damaged.
    """
    return flat_specs(RawColumns(data).signature) if has_schema(data) else None


@contextlib.contextmanager
def _flags_named() -> Iterator[None]:
    """Converts a ValueError of the Python API to a UsageError that names the flag."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for argument, flag in _FLAGS_OF.items():
            text = re.sub(f"^{argument}", flag, text)
        raise UsageError(text) from error


def _build_variables(model: Any, element_spec: Any) -> None:
    """Creates the variables of model, metrics and optimizer with an empty batch."""
    features, label = no_inputs(element_spec[:2], "training data")
    outputs = model(features, training=False)
    model.compute_metrics(features, label, outputs)
    model.reset_metrics()
    model.optimizer.build(model.trainable_variables)


def _cause(error: tf.errors.OpError) -> str:
    """Returns the line of a TensorFlow error message that names the cause."""
    raised_in_python = re.search(r"^.*?\w+Error: (.+)$", error.message, re.MULTILINE)
    if raised_in_python:
        return raised_in_python.group(1)
    # The message of the op is the last line before the trace of the graph node.
    account = error.message.split("[[{{")[0].split("\n")
    lines = [line.strip() for line in account if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _check_account(inputs: dict[str, int], read: int) -> None:
    """Raises `RunError` if a read example is not accounted for."""
    accounted = inputs["trained"] + inputs["skipped"] + inputs.get("lost", 0)
    if not accounted == inputs["seen"] == read:
        raise RunError(
            f"The numbers of examples do not add up: {read:,} were read and {inputs['seen']:,} "
            f"were received, but {inputs['trained']:,} were trained, {inputs['skipped']:,} were "
            f"skipped and {inputs.get('lost', 0):,} were lost by ranks that left. No metrics.json "
            "is written. Please report this bug."
        )


def _row_lookups(reader: Any, trained: int) -> int | None:
    """Returns the number of row lookups in training.

    Args:
        reader: Reader of the training part.
        trained: Number of trained examples.

    Returns:
        The number, or None if a field is a list.
    """
    features, _ = reader.dataset().element_spec
    if not isinstance(features["keys"], tf.TensorSpec):
        return None
    return trained * len(reader.spec.fields)
