"""One training run from settings to record: read, train with `model.fit`, evaluate, account.

In: `Settings` and the readers of both parts. Out: the content of metrics.json.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf.cli.build import (
    build_embeddings,
    build_model,
    saturation_config,
    warmup_steps,
)
from slipstream_tf.cli.checkpoints import RunCheckpoints, Saving, describe, require_same_run
from slipstream_tf.cli.counting import BarCallback, StepTimer, counted, first_inputs, handed_out
from slipstream_tf.cli.curve import CurveCallback
from slipstream_tf.cli.data import Parts
from slipstream_tf.cli.evaluation import evaluate, predictor
from slipstream_tf.cli.flag_set import RunError, UsageError
from slipstream_tf.cli.ranks import agreed
from slipstream_tf.cli.settings import Settings
from slipstream_tf.cli.totals import (
    inputs_of_rank,
    share_by_id,
    share_of_rank,
    total,
    total_gradient_rows,
    total_metrics,
    traffic_record,
)
from slipstream_tf.distributed import Communicator, even_ends, with_next
from slipstream_tf.distributed.batches import no_inputs
from slipstream_tf.distributed.settings import require_same
from slipstream_tf.export import saved_model
from slipstream_tf.inputs.look_ahead import LookAhead
from slipstream_tf.inputs.segregation import profile_hot_keys, segregate
from slipstream_tf.keras import RanksCallback, Slipstream
from slipstream_tf.saturation.hot_set import snapshot_bytes
from slipstream_tf.telemetry.metrics import ClickMetrics
from slipstream_tf.telemetry.progress import TrainingBar
from slipstream_tf.telemetry.run_record import SCHEMA, PhaseClock, machine, versions

_compat.require_keras()


def run(
    settings: Settings,
    parts: Parts,
    clock: PhaseClock,
    comm: Communicator,
    export_to: str | None = None,
    saving: Saving | None = None,
    callbacks_beside: Sequence[Any] = (),
) -> dict[str, Any]:
    """Trains and evaluates; with several ranks a collective.

    Batch i of the data goes to rank i % size, so that a step of the job is `comm.size` batches in a
    row: that of one process with batches so much larger. Where losses are remembered, an input goes
    to the rank that its number says, in every epoch.

    Args:
        settings: of the run.
        parts: the data; every rank reads all of it.
        clock: has the time that opening the data took; the other phases are added.
        comm: the ranks. Rank 0 shows progress.
        export_to: folder for a SavedModel of the trained model, which gives probabilities.
        saving: of checkpoints; None: none are saved.
        callbacks_beside: Keras callbacks of a caller's own, called last.

    Returns:
        The record: JSON-serialisable, see README.md, "metrics.json". Its numbers are those of all
        ranks together; seconds and machine are this rank's.

    Raises:
        UsageError, AgreedError: the model cannot be built from these settings and this data.
        RunError: training broke off, inputs got lost, or the SavedModel could not be written.
    """
    spec = parts.train.spec
    # Rank 0's weights go to all; what differs is which units dropout leaves out.
    keras.utils.set_random_seed(settings.seed + comm.rank)
    planned = _planned_inputs(settings, parts.num_inputs)
    planned_steps = planned_steps_of(settings, parts, comm.size)
    timer = StepTimer(_steps_before_skipping(settings, planned_steps))
    _require_same_run(settings, parts, comm)
    saving = saving or Saving()
    saved_run = describe(settings, spec, comm.size)
    if saving.is_used:
        with agreed(comm, "resume"):
            require_same_run(saving, saved_run)
    with clock.phase("reading"), agreed(comm, "segregate"):
        hot_keys = _hot_keys(settings, parts.train.dataset()) if settings.segregate else None
    saved: RunCheckpoints | None = None
    training_since = time.perf_counter()
    with clock.phase("training"):
        with agreed(comm, "build"):
            if settings.wire_dtype != "float32" and settings.wire_warmup_steps is None:
                _require_warmup_steps(settings, planned_steps)
            try:
                embeddings = build_embeddings(settings, tuple(spec.fields), comm, planned_steps)
                model = build_model(settings, embeddings, spec.num_dense, comm)
                slipstream = _engine(settings, embeddings, planned_steps)
            except ValueError as error:
                raise UsageError(str(error)) from None
        with tf.device("CPU:0"):
            read, seen, pulled = (tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3))
        dataset = counted(_all_inputs(settings, parts.train.dataset()), read)
        if settings.needs_ids:
            dataset = share_by_id(dataset, settings.batch_size, comm)
        else:
            dataset = share_of_rank(dataset, comm)
        reading = LookAhead()
        dataset = counted(reading.read(dataset), seen)
        dataset = _training_data(settings, dataset, slipstream, hot_keys)
        dataset = handed_out(dataset, seen, pulled, slipstream)

        def settle() -> None:
            if slipstream is not None:
                slipstream.settle()
            reading.settle()

        dataset = even_ends(dataset.with_options(_data_options(settings)), comm)
        dataset = with_next(dataset) if settings.prefetch else dataset
        predict, test = predictor(model), _test_data(settings, parts, comm)

        def evaluate_on_the_way() -> ClickMetrics:
            with comm.uncounted():
                return evaluate(predict, test, comm)

        curve = CurveCallback(
            lambda: int(pulled.numpy()),
            evaluate_on_the_way,
            settings.evaluate_every,
            timer.leave_out,
        )
        own = None if planned is None else inputs_of_rank(planned, settings.batch_size, comm)
        with TrainingBar(own, _title(settings, comm), comm.rank == 0) as bar:
            shows = BarCallback(bar, None if slipstream is None else lambda: int(pulled.numpy()))
            callbacks: list[Any] = [shows] if comm.rank == 0 else []
            if slipstream is None:
                callbacks.append(RanksCallback(comm, embeddings.store))
            else:
                callbacks.append(slipstream.callback(settings.tensorboard))
            callbacks += [curve, timer, *callbacks_beside]
            batches = iter(dataset)
            with comm.uncounted():
                _build_variables(model, dataset.element_spec)
            if saving.is_used:
                saved = RunCheckpoints(
                    saving, saved_run, model, slipstream, embeddings.store, batches,
                    (read, seen, pulled), settle, comm, curve, timer, clock, training_since,
                )  # fmt: skip
            with nullcontext() if saved is None else saved.noticing():
                _fit(model, batches, callbacks, saved)
    clock.move(curve.evaluation_seconds, "training", "evaluation")
    windows: list[dict[str, Any]] = []
    skipped, summary, shadow = 0, "", None
    if slipstream is not None:
        # The inputs since the last window's end are in no report yet.
        slipstream.end_window()
        reports = [r for r in slipstream.tracker.reports if r.inputs_seen]
        windows = [report.to_dict() for report in reports]
        skipped = sum(report.inputs_skipped for report in reports)
        summary = slipstream.summary()
        if slipstream.config.shadow:
            shadow = slipstream.shadow_estimate().to_dict()
        clock.move(sum(r.seconds for r in slipstream.tracker.reports), "training", "window_ends")
    traffic = traffic_record(comm, saved.bytes_before if saved else None)
    training = total_metrics(model, comm)
    inputs = {
        "seen": total(comm, int(seen.numpy()), "seen"),
        "trained": training.pop("trained"),
        "skipped": skipped,
    }
    _check_account(inputs, int(read.numpy()))
    with clock.phase("evaluation"):
        quality = evaluate(predict, test, comm)
    if export_to is not None:
        _export(model, export_to)
    return {
        "schema": SCHEMA,
        "data": spec.name,
        "test": quality.to_dict(),
        "training": training,
        **curve.entries(comm, quality, inputs),
        "inputs": {**inputs, "bad_lines": parts.train.bad_lines.count, "planned": planned},
        "test_bad_lines": parts.test.bad_lines.count,
        "row_lookups": _row_lookups(parts.train, inputs["trained"]),
        "rows": _rows(settings, embeddings, comm),
        "gradient_rows": total_gradient_rows(embeddings, comm, saved.rows_before if saved else {}),
        "ranks": traffic,
        "seconds": {**clock.seconds, "total": sum(clock.seconds.values())},
        "resumed_at": saved.resumed_at if saved else [],
        "wall_seconds": saved.wall_seconds_before if saved else 0.0,
        "seconds_per_step_after_warmup": timer.seconds_per_step,
        "windows": windows,
        "summary": summary,
        "shadow": shadow,
        "engine": None if slipstream is None else slipstream.config.get_config(),
        "settings": settings.to_dict(),
        "versions": versions(),
        "machine": machine(),
    }


def _export(model: Any, path: str) -> None:
    model.returns_logits = False  # Which training and evaluation are done with.
    try:
        saved_model(model, path)
    except (OSError, ValueError) as error:
        raise RunError(f"The SavedModel was not written: {error}") from error


def _test_data(settings: Settings, parts: Parts, comm: Communicator) -> tf.data.Dataset:
    test = share_of_rank(parts.test.dataset(), comm)
    # Every lookup of sharded rows asks the other ranks.
    return even_ends(test, comm) if settings.placement == "sharded" else test


def _rows(settings: Settings, embeddings: Any, comm: Communicator) -> dict[str, int]:
    """Rows of each table: of sharded ones, those of all ranks."""
    own = {table.name: embeddings.store.size(table.name) for table in embeddings.tables}
    if settings.placement == "replicated":
        return own
    return {name: total(comm, rows, f"rows.{name}") for name, rows in own.items()}


def planned_steps_of(settings: Settings, parts: Parts, ranks: int) -> int | None:
    """Returns the steps of the job, over all epochs; None if the reader cannot tell."""
    planned = _planned_inputs(settings, parts.num_inputs)
    return None if planned is None else math.ceil(planned / (settings.batch_size * ranks))


def _planned_inputs(settings: Settings, num_inputs: int | None) -> int | None:
    """Inputs that will come in, over all epochs; None if the reader cannot tell."""
    limits = [n for n in (settings.max_inputs, settings.stop_after) if n is not None]
    if num_inputs is not None:
        limits.append(num_inputs * settings.epochs)
    elif not limits:
        return None
    return min(limits)


def _require_same_run(settings: Settings, parts: Parts, comm: Communicator) -> None:
    """Ranks that read other data, or were given other flags, would wait for each other for ever."""
    run = {"settings": settings.to_dict(), "data": dataclasses.asdict(parts.train.spec)}
    try:
        require_same(comm, run, "slipstream.run", "slipstream-train")
    except ValueError as error:  # on all ranks
        with agreed(comm, "run"):
            raise UsageError(str(error)) from None


def _steps_before_skipping(settings: Settings, planned_steps: int | None) -> int:
    """The warm-up, at least one step; where skipping follows, up to the end of its last window."""
    steps = warmup_steps(settings, planned_steps)
    if settings.skip != "none" or settings.control == "random":
        steps = -(-steps // settings.snapshot_interval) * settings.snapshot_interval
    return max(1, steps)


def _require_warmup_steps(settings: Settings, planned_steps: int | None) -> None:
    if planned_steps is None and settings.warmup_steps is None and settings.warmup > 0:
        raise UsageError(
            f"Invalid flag --warmup={settings.warmup:g}: how many inputs the data has is not "
            "known, so a share of the steps is not, either. Give --warmup_steps or --max_inputs."
        )


def _engine(settings: Settings, embeddings: Any, planned_steps: int | None) -> Slipstream | None:
    if not settings.uses_engine:
        return None
    _require_warmup_steps(settings, planned_steps)
    config = saturation_config(settings, planned_steps)
    return Slipstream(embeddings, config, estimates_cost=config.shadow)


def _hot_keys(settings: Settings, dataset: tf.data.Dataset) -> list[Any]:
    try:
        budget = round(settings.hot_budget_mb * 2**20)
        return profile_hot_keys(dataset, budget, snapshot_bytes(settings.dim))
    except ValueError as error:
        raise UsageError(f"Flag --segregate cannot be used here. {error}") from None


def _all_inputs(settings: Settings, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """All epochs in a row, limited: what all ranks train together.

    One data set over all epochs keeps batches full across their ends, and lets a limit fall in any.
    """
    if settings.epochs > 1:
        dataset = dataset.repeat(settings.epochs).rebatch(settings.batch_size)
    for limit in (settings.max_inputs, settings.stop_after):
        if limit is not None:
            dataset = first_inputs(dataset, limit)
    return dataset


def _training_data(
    settings: Settings,
    dataset: tf.data.Dataset,
    slipstream: Slipstream | None,
    hot_keys: Sequence[Any] | None,
) -> tf.data.Dataset:
    """A rank's batches, segregated or with skippable inputs left out."""
    if hot_keys is not None:
        dataset = segregate(dataset, hot_keys, settings.batch_size)
    if slipstream is None:
        return dataset
    # Nothing leaves in shadow mode: batches stay as they are.
    batch_size = None if slipstream.config.shadow else settings.batch_size
    return slipstream.leave_out(dataset, batch_size)


def _data_options(settings: Settings) -> tf.data.Options:
    options = tf.data.Options()
    # Nothing but `LookAhead` works ahead, which those who count and save wait for.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    if settings.threads is not None:
        options.threading.private_threadpool_size = settings.threads
    return options


def _build_variables(model: Any, element_spec: Any) -> None:
    """Makes the variables of model, metrics and optimizer, by a batch of no inputs."""
    spec = element_spec[:2]
    features, label = tf.nest.map_structure(lambda part: no_inputs(part, "training data"), spec)
    outputs = model(features, training=False)
    model.compute_metrics(features, label, outputs)
    model.reset_metrics()
    model.optimizer.build(model.trainable_variables)


def _fit(model: Any, batches: Any, callbacks: list[Any], saved: RunCheckpoints | None) -> None:
    """Does what `model.fit` does in one epoch, over an iterator whose place can be saved."""
    listed = keras.callbacks.CallbackList(callbacks, model=model, epochs=1, steps=None, verbose=0)
    model.stop_training = False
    model.make_train_function()
    try:
        listed.on_train_begin()
        model.reset_metrics()
        listed.on_epoch_begin(0)
        step = 0
        if saved is not None:
            # After what begins training: it applies what ranks hold back.
            step = saved.restore()
            saved.begin()
        while True:
            listed.on_train_batch_begin(step)
            try:
                logs = model.train_function(batches)
            except tf.errors.OutOfRangeError:
                break
            listed.on_train_batch_end(step, logs)
            step += 1
            if saved is not None:
                saved.after_step(step)
        if saved is not None:
            saved.wait()
        if not step:
            raise RunError("The training part has no inputs; nothing was trained.")
        logs = dict(model.get_metrics_result())
        listed.on_epoch_end(0, logs)
        listed.on_train_end(logs)
    except tf.errors.OpError as error:
        raise RunError(f"Training broke off. {_cause(error)}") from None


def _cause(error: tf.errors.OpError) -> str:
    """The line of a message that tells the cause; the rest is TensorFlow's account of the graph."""
    raised_in_python = re.search(r"^.*?\w+Error: (.+)$", error.message, re.MULTILINE)
    if raised_in_python:
        return raised_in_python.group(1)
    # Under the account of a graph's node stands what its op said.
    account = error.message.split("[[{{")[0].split("\n")
    lines = [line.strip() for line in account if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _check_account(inputs: dict[str, int], read: int) -> None:
    if not inputs["trained"] + inputs["skipped"] == inputs["seen"] == read:
        raise RunError(
            f"Inputs got lost: {read:,} were read and {inputs['seen']:,} came in, but "
            f"{inputs['trained']:,} were trained and {inputs['skipped']:,} skipped. No record is "
            "written. Please report this."
        )


def _row_lookups(reader: Any, trained: int) -> int | None:
    """Rows looked up in training; None where an input has bags of its own lengths."""
    features, _ = reader.dataset().element_spec
    if not isinstance(features["keys"], tf.TensorSpec):
        return None
    return trained * len(reader.spec.fields)


def _title(settings: Settings, comm: Communicator) -> str:
    if settings.control != "none":
        title = settings.control
    else:
        mode = "shadow" if settings.engine.get("shadow") else "skip"
        title = "plain" if settings.skip == "none" else f"{mode} {settings.skip}"
    return title if comm.size == 1 else f"{title}, rank {comm.rank} of {comm.size}"
