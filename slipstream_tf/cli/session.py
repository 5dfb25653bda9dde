"""One training run from settings to record: read, train with `model.fit`, evaluate, account.

In: `Settings` and the readers of both parts. Out: the content of metrics.json.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf.cli.build import build_embeddings, build_model, saturation_config
from slipstream_tf.cli.counting import BarCallback, counted, first_inputs
from slipstream_tf.cli.data import Parts
from slipstream_tf.cli.flag_set import RunError, UsageError
from slipstream_tf.cli.settings import Settings
from slipstream_tf.inputs.segregation import profile_hot_keys, segregate
from slipstream_tf.keras import Slipstream
from slipstream_tf.saturation.hot_set import snapshot_bytes
from slipstream_tf.telemetry.metrics import ClickMetrics, click_metrics
from slipstream_tf.telemetry.progress import TrainingBar
from slipstream_tf.telemetry.run_record import SCHEMA, PhaseClock, machine, versions

_compat.require_keras()


def run(
    settings: Settings, parts: Parts, clock: PhaseClock, is_bar_shown: bool = True
) -> dict[str, Any]:
    """Trains and evaluates.

    Args:
        settings: of the run.
        parts: the data.
        clock: has the time that opening the data took; the other phases are added.
        is_bar_shown: whether progress is shown.

    Returns:
        The record: JSON-serialisable, see README.md, "metrics.json".

    Raises:
        UsageError: the model cannot be built from these settings and this data.
        RunError: training broke off, or inputs got lost.
    """
    spec = parts.train.spec
    keras.utils.set_random_seed(settings.seed)
    planned = _planned_inputs(settings, parts.num_inputs)
    with clock.phase("reading"):
        hot_keys = _hot_keys(settings, parts.train.dataset()) if settings.segregate else None
    with clock.phase("training"):
        try:
            embeddings = build_embeddings(settings, tuple(spec.fields))
            model = build_model(settings, embeddings, spec.num_dense)
            slipstream = _engine(settings, embeddings, planned)
        except ValueError as error:
            raise UsageError(str(error)) from None
        with tf.device("CPU:0"):
            seen = tf.Variable(0, dtype=tf.int64, trainable=False)
        dataset = _training_data(settings, parts.train.dataset(), seen, slipstream, hot_keys)
        with TrainingBar(planned, _title(settings), is_bar_shown) as bar:
            callbacks: list[Any] = [BarCallback(bar)]
            if slipstream is not None:
                callbacks = [BarCallback(bar, lambda: int(seen.numpy()))]
                callbacks.append(slipstream.callback())
            losses = _fit(model, dataset, callbacks)
    inputs = {"seen": int(seen.numpy()), "trained": losses.pop("trained"), "skipped": 0}
    windows: list[dict[str, Any]] = []
    summary = ""
    if slipstream is not None:
        # The inputs since the last window's end are in no report yet.
        slipstream.end_window()
        reports = [r for r in slipstream.tracker.reports if r.inputs_seen]
        windows = [report.to_dict() for report in reports]
        inputs["skipped"] = sum(report.inputs_skipped for report in reports)
        summary = slipstream.summary()
        clock.move(sum(r.seconds for r in slipstream.tracker.reports), "training", "window_ends")
    _check_account(inputs)
    with clock.phase("evaluation"):
        quality = evaluate(model, parts.test.dataset())
    return {
        "schema": SCHEMA,
        "data": spec.name,
        "test": quality.to_dict(),
        "training": losses,
        "inputs": {**inputs, "bad_lines": parts.train.bad_lines.count, "planned": planned},
        "test_bad_lines": parts.test.bad_lines.count,
        "row_lookups": _row_lookups(parts.train, inputs["trained"]),
        "rows": {table.name: embeddings.store.size(table.name) for table in embeddings.tables},
        "gradient_rows": {
            table.name: dataclasses.asdict(embeddings.store.update_counts(table.name))
            for table in embeddings.tables
        },
        "seconds": {**clock.seconds, "total": sum(clock.seconds.values())},
        "windows": windows,
        "summary": summary,
        "engine": None if slipstream is None else slipstream.config.get_config(),
        "settings": settings.to_dict(),
        "versions": versions(),
        "machine": machine(),
    }


def evaluate(model: Any, dataset: tf.data.Dataset) -> ClickMetrics:
    """Measures a model that gives logits on a whole data set; changes nothing in it.

    Args:
        model: a Keras model.
        dataset: batches (features, label).

    Returns:
        The exact metrics.

    Raises:
        RunError: the data set is empty, or a logit is not finite.
    """
    predict = tf.function(lambda features: model(features, training=False), reduce_retracing=True)
    labels, logits = [], []
    for features, label in dataset:
        logits.append(predict(features).numpy().ravel())
        labels.append(label.numpy().ravel())
    if not labels:
        raise RunError("The test part has no inputs; nothing can be measured.")
    try:
        return click_metrics(np.concatenate(labels), np.concatenate(logits))
    except ValueError as error:
        raise RunError(f"The model cannot be measured on the test part. {error}") from None


def _planned_inputs(settings: Settings, num_inputs: int | None) -> int | None:
    """Inputs that will come in, over all epochs; None if the reader cannot tell."""
    limits = [n for n in (settings.max_inputs, settings.stop_after) if n is not None]
    if num_inputs is not None:
        limits.append(num_inputs * settings.epochs)
    elif not limits:
        return None
    return min(limits)


def _engine(settings: Settings, embeddings: Any, planned: int | None) -> Slipstream | None:
    if not settings.uses_engine:
        return None
    if planned is None and settings.warmup_steps is None and settings.warmup > 0:
        raise UsageError(
            f"Invalid flag --warmup={settings.warmup:g}: how many inputs the data has is not "
            "known, so a share of the steps is not, either. Give --warmup_steps or --max_inputs."
        )
    steps = None if planned is None else math.ceil(planned / settings.batch_size)
    return Slipstream(embeddings, saturation_config(settings, steps))


def _hot_keys(settings: Settings, dataset: tf.data.Dataset) -> list[Any]:
    try:
        budget = round(settings.hot_budget_mb * 2**20)
        return profile_hot_keys(dataset, budget, snapshot_bytes(settings.dim))
    except ValueError as error:
        raise UsageError(f"Flag --segregate cannot be used here. {error}") from None


def _training_data(
    settings: Settings,
    dataset: tf.data.Dataset,
    seen: tf.Variable,
    slipstream: Slipstream | None,
    hot_keys: Sequence[Any] | None,
) -> tf.data.Dataset:
    """All epochs in a row, limited, counted, segregated or with skippable inputs left out.

    One data set over all epochs keeps batches full across their ends, and lets a limit fall in any.
    """
    if settings.epochs > 1:
        dataset = dataset.repeat(settings.epochs).rebatch(settings.batch_size)
    for limit in (settings.max_inputs, settings.stop_after):
        if limit is not None:
            dataset = first_inputs(dataset, limit)
    dataset = counted(dataset, seen)
    if hot_keys is not None:
        dataset = segregate(dataset, hot_keys, settings.batch_size)
    if settings.threads is not None:
        options = tf.data.Options()
        options.threading.private_threadpool_size = settings.threads
        dataset = dataset.with_options(options)
    if slipstream is None:
        return dataset
    return slipstream.apply(dataset, batch_size=settings.batch_size)


def _fit(model: Any, dataset: tf.data.Dataset, callbacks: list[Any]) -> dict[str, Any]:
    """Trains; returns the loss, the streaming AUC and the inputs of all steps."""
    try:
        with warnings.catch_warnings():
            # How many batches come is not known before, which Keras takes for a mistake.
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            fitted = model.fit(dataset, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
    except tf.errors.OpError as error:
        raise RunError(f"Training broke off. {_cause(error)}") from None
    history = fitted.history
    if "loss" not in history:
        raise RunError("The training part has no inputs; nothing was trained.")
    return {
        "loss": float(history["loss"][-1]),
        "auc": float(history["auc"][-1]),
        "trained": int(history["trained"][-1]),
    }


def _cause(error: tf.errors.OpError) -> str:
    """The line of a message that tells the cause; the rest is TensorFlow's account of the graph."""
    raised_in_python = re.search(r"^.*?\w+Error: (.+)$", error.message, re.MULTILINE)
    if raised_in_python:
        return raised_in_python.group(1)
    # Under the account of a graph's node stands what its op said.
    account = error.message.split("[[{{")[0].split("\n")
    lines = [line.strip() for line in account if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _check_account(inputs: dict[str, int]) -> None:
    if inputs["trained"] + inputs["skipped"] != inputs["seen"]:
        raise RunError(
            f"Inputs got lost: {inputs['seen']:,} came in, but {inputs['trained']:,} were trained "
            f"and {inputs['skipped']:,} skipped. No record is written. Please report this."
        )


def _row_lookups(reader: Any, trained: int) -> int | None:
    """Rows looked up in training; None where an input has bags of its own lengths."""
    features, _ = reader.dataset().element_spec
    if not isinstance(features["keys"], tf.TensorSpec):
        return None
    return trained * len(reader.spec.fields)


def _title(settings: Settings) -> str:
    if settings.control != "none":
        return settings.control
    return "plain" if settings.skip == "none" else f"skip {settings.skip}"
