"""Builds embedding tables, model, optimizers and engine from settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import initializers, optimizers, policies
from slipstream_tf.baselines import RowDrift, SkipAtRandom
from slipstream_tf.baselines.hot_rows import Hotline, HotRows
from slipstream_tf.cli.callbacks import LOG_LOSS, InputCount
from slipstream_tf.cli.flag_set import UsageError
from slipstream_tf.cli.settings import Settings
from slipstream_tf.cli.train_flags import predicts_losses
from slipstream_tf.config import DryRun, HotSet, Retention, Saturation, Storage, Table, Window
from slipstream_tf.data.spec import DenseScale
from slipstream_tf.distributed import Communicator, DistributedOptimizer
from slipstream_tf.keras import EmbeddingCollection, Slipstream
from slipstream_tf.keras.loss_feedback import binary_cross_entropy
from slipstream_tf.models import DLRM, DCNv2, DeepFM, Standardization
from slipstream_tf.policies.base import Policy

_MAX_AT_ONCE = 16


def build_embeddings(
    settings: Settings,
    features: Mapping[str, str],
    comm: Communicator,
    planned_steps: int | None = None,
    hot_keys: Sequence[Any] | None = None,
) -> EmbeddingCollection:
    """Creates an embedding layer for the categorical fields. A collective.

    Args:
        settings: The settings of the run.
        features: Table of each categorical field, in the order of the key columns, see
            `DataSpec.features`.
        comm: The communicator of the job.
        planned_steps: Planned number of steps if no examples are skipped, or None if it is unknown.
            Used for a warm-up that is given as a fraction.
        hot_keys: Hot keys per field for the schedule of a baseline, or None.

    Returns:
        The embedding layer.

    Raises:
        UsageError: If `wire_dtype` needs a warm-up of unknown length, or a schedule of the
            baselines needs a table per field.
    """
    if settings.wire_dtype != "float32":
        _require_known_warmup(settings, planned_steps)
    half_width, retention = settings.rows_init, None
    storage = Storage(settings.row_dtype, settings.slot_dtype, settings.memory, settings.spill)
    if settings.capacity is not None:
        retention = Retention(settings.capacity, settings.eviction)
    names = list(dict.fromkeys(features.values()))
    tables = [
        Table(
            name,
            settings.dim,
            # Derive the seed from the index, so that the names of the tables do not change the
            # initial rows.
            initializer=initializers.RandomUniform(
                -half_width, half_width, settings.seed * len(names) + index
            ),
            retention=retention,
            storage=storage,
        )
        for index, name in enumerate(names)
    ]
    if hot_keys is not None and len(names) < len(features):
        raise UsageError(
            f"Invalid flag --schedule={settings.schedule} for {settings.data}: fields share a "
            "table. Expected --schedule=plain, or data with a table per field."
        )
    if hot_keys is not None and (settings.schedule == "hotline" or comm.size > 1):
        optimizer = _rows_optimizer(settings)
        return HotRows(tables, optimizer, hot_keys, comm, dtype=settings.precision)
    return EmbeddingCollection(
        tables,
        _rows_optimizer(settings),
        features,
        comm=comm,
        placement=settings.placement,
        wire_dtype=settings.wire_dtype,
        wire_warmup_steps=warmup_steps(settings, planned_steps),
        prefetch=settings.prefetch,
        dtype=settings.precision,
    )


def _rows_optimizer(settings: Settings) -> optimizers.SparseOptimizer:
    optimizer = optimizers.get(settings.rows_optimizer)
    chosen: dict[str, Any] = {"learning_rate": settings.rows_learning_rate}
    if settings.rows_l2:
        chosen["l2"] = settings.rows_l2
    if settings.rows_l2 or optimizer.weight_decay:
        chosen["decay"] = settings.rows_decay
    return dataclasses.replace(optimizer, **chosen)


def build_model(
    settings: Settings,
    embeddings: EmbeddingCollection,
    num_dense: int,
    comm: Communicator,
    scales: Sequence[DenseScale] = (),
) -> Any:
    """Creates and compiles the model, which returns logits.

    Args:
        settings: The settings of the run.
        embeddings: The embedding layer.
        num_dense: Number of numeric features per example.
        comm: The communicator over which gradients are averaged.
        scales: Scales of the numeric features, `DataSpec.scales`.

    Returns:
        A compiled `keras.Model` with the metrics "loss", "auc" and "trained", the number of
        examples. With skipping by predicted loss it also has `callbacks.LOG_LOSS`.

    Raises:
        UsageError: If batch normalization is used with multiple ranks.
    """
    if settings.batch_norm and comm.size > 1:
        raise UsageError(
            f"Invalid flag --batch_norm with {comm.size} ranks: each rank would compute different "
            "moving averages. Expected --nobatch_norm."
        )
    common: dict[str, Any] = {
        "dropout": settings.dropout,
        "returns_logits": True,
        "batch_norm": settings.batch_norm,
        "dtype": settings.precision,
        "standardization": Standardization(scales) if scales else None,
    }
    kind: Any
    kind, *layers = {
        "dlrm": (DLRM, [*settings.bottom, settings.dim], [*settings.mlp, 1]),
        "deepfm": (DeepFM, settings.mlp),
        "dcn": (DCNv2, settings.cross_layers, None, settings.mlp),
    }[settings.model]
    if settings.schedule == "hotline":
        kind = type(f"Hotline{kind.__name__}", (Hotline, kind), {})
    model = kind(embeddings, num_dense, *layers, **common)
    if settings.click_rate is not None and 0.0 < settings.click_rate < 1.0:
        # Otherwise the rows of all keys learn first that clicks are rare.
        model.start_at(settings.click_rate)
    optimizer: Any = keras.optimizers.Adam(settings.learning_rate)
    if comm.size > 1:
        optimizer = DistributedOptimizer(optimizer, comm)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    auc: Any = keras.metrics.AUC(from_logits=True, name="auc")
    trained: Any = InputCount(name="trained")
    metrics: dict[str, Any] = {"metrics": [auc, trained]}
    if predicts_losses(settings):
        # The weighted mean over the kept examples estimates the log loss of all examples. Keras's
        # `loss` divides by the batch size instead, so it grows with the weights.
        log_loss = keras.metrics.MeanMetricWrapper(_log_loss, name=LOG_LOSS)
        metrics = {"weighted_metrics": [auc, log_loss, trained]}
    model.compile(optimizer, loss, **metrics)
    return model


def steps_per_execution(settings: Settings, *ends: int | None) -> int:
    """Returns the number of steps per call of the train function.

    Grouped steps avoid Python overhead, about a quarter of the time of a small step. The result
    is in [1, 16] and divides all intervals after which Python code must run: windows, evaluations
    and `ends`.

    Args:
        settings: The settings of the run. `window_steps` must be set if the engine is used.
        *ends: Further intervals in steps, for example between checkpoints. 0 and None are ignored.
    """
    windows = settings.window_steps if settings.uses_engine else None
    common = math.gcd(*(steps or 0 for steps in (windows, settings.evaluate_every, *ends)))
    return max(n for n in range(1, _MAX_AT_ONCE + 1) if common % n == 0)


def _log_loss(labels: Any, logits: Any) -> Any:
    """Returns the loss per example, [batch]; logits are [batch, 1]."""
    return binary_cross_entropy(tf.cast(tf.reshape(labels, [-1]), tf.float32), logits, True)


def build_engine(
    settings: Settings, embeddings: EmbeddingCollection, planned_steps: int | None
) -> Slipstream | None:
    """Creates the saturation engine, or returns None if the run needs none.

    Args:
        settings: The settings of the run.
        embeddings: The embedding layer.
        planned_steps: Planned number of steps if no examples are skipped, or None if it is unknown.

    Raises:
        UsageError: If the warm-up is a fraction of an unknown number of steps.
    """
    if not settings.uses_engine:
        return None
    _require_known_warmup(settings, planned_steps)
    warmup = warmup_steps(settings, planned_steps)
    window = Window(settings.window_steps, warmup, planned_steps, seed=settings.seed)
    engine = settings.engine
    saturation = _given(engine, revisit_every="revisit_every")
    return Slipstream(
        embeddings,
        window=window,
        policies=policies_of(settings),
        hot_set=HotSet(**_given(engine, memory="hot_set_memory")),
        saturation=Saturation(**saturation) if saturation else None,
        max_auc_loss=engine.get("max_auc_loss"),
        dry_run=DryRun(estimates_cost=True) if settings.dry_run else False,
    )


def policies_of(settings: Settings) -> list[Policy]:
    """Returns the policies of a run, in the order of --policies.

    The control "random" adds a policy that skips examples at random.
    """
    engine = settings.engine
    found: list[Policy] = []
    for name in settings.policies:
        if name == "defer_gradients":
            limits = _given(engine, distance="defer_movement", max_age="defer_max_age")
            found.append(policies.DeferGradients(policies.Movement(**limits)))
        elif name == "mask_gradients":
            found.append(policies.MaskGradients(**_given(engine, fraction="mask_fraction")))
        else:
            score: Any = RowDrift(engine["skip_alpha"])
            if predicts_losses(settings):
                score = policies.PredictedLoss(**_given(engine, pilot="pilot"))
            rates = _given(engine, fraction="skip_fraction", keep_rate="skip_keep_rate")
            found.append(policies.SkipExamples(score, **rates))
    if settings.control == "random":
        found.append(SkipAtRandom(settings.random_fractions))
    return found


def _given(engine: Mapping[str, Any], **flags: str) -> dict[str, Any]:
    """Returns the keyword arguments for the flags that were given.

    Args:
        engine: Values by flag name, see `Settings.engine`.
        **flags: Flag name for each argument name.
    """
    return {argument: engine[flag] for argument, flag in flags.items() if flag in engine}


def validation_steps(settings: Settings, num_examples: int | None, ranks: int) -> int:
    """Returns the steps between evaluations of the validation part.

    This is `evaluate_every`, or the steps of an epoch if `evaluate_every` is None.

    Args:
        settings: The settings of the run.
        num_examples: Number of training examples per epoch, or None if it is unknown.
        ranks: Number of ranks of the job.

    Raises:
        UsageError: If the length of an epoch is needed and unknown, or the run ends before the
            second evaluation.
    """
    steps = settings.evaluate_every
    if steps is None and num_examples is not None:
        steps = math.ceil(num_examples / (settings.batch_size * ranks))
    if steps is None:
        raise UsageError(
            f"Invalid flag --early_stopping={settings.early_stopping}: the number of examples in "
            f"{settings.data} is unknown, so the number of steps in an epoch is unknown. Expected "
            "--evaluate_every, the steps between evaluations."
        )
    planned = planned_steps(settings, num_examples, ranks)
    if planned is not None and planned < 2 * steps:
        raise UsageError(
            f"Invalid flag --early_stopping={settings.early_stopping}: the run has {planned:,} "
            f"steps and evaluates every {steps:,} steps, so it ends before it can stop early. "
            f"Expected at least {2 * steps:,} steps. Pass more --epochs, a smaller "
            "--evaluate_every, or --early_stopping=0."
        )
    return steps


def planned_inputs(settings: Settings, num_examples: int | None) -> int | None:
    """Returns the number of training examples over all epochs and ranks.

    Args:
        settings: The settings of the run.
        num_examples: Number of training examples per epoch, or None if it is unknown.

    Returns:
        The number without skipping, at most `max_examples` and `stop_after`. None if none of these
        numbers is known.
    """
    of_all_epochs = None if num_examples is None else num_examples * settings.epochs
    limits = (settings.max_examples, settings.stop_after, of_all_epochs)
    return min((n for n in limits if n is not None), default=None)


def planned_steps(settings: Settings, num_examples: int | None, ranks: int) -> int | None:
    """Returns the number of steps over all epochs without skipping.

    Args:
        settings: The settings of the run.
        num_examples: Number of training examples per epoch, or None if it is unknown.
        ranks: Number of ranks of the job.

    Returns:
        The number, or None if it is unknown.
    """
    planned = planned_inputs(settings, num_examples)
    return None if planned is None else math.ceil(planned / (settings.batch_size * ranks))


def warmup_steps(settings: Settings, planned_steps: int | None) -> int:
    """Returns the number of warm-up steps.

    If the settings contain a fraction, it is a fraction of `planned_steps`, or 0 steps if the plan
    is unknown.
    """
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return round(settings.warmup * (planned_steps or 0))


def steps_before_skipping(settings: Settings, planned_steps: int | None) -> int:
    """Returns the number of steps before skipping starts, at least 1.

    With policies or the control "random", the warm-up is rounded up to whole windows, because
    decisions are made at the end of a window.

    Args:
        settings: The settings of the run.
        planned_steps: Planned number of steps if no examples are skipped, or None if it is unknown.
    """
    steps = warmup_steps(settings, planned_steps)
    if settings.policies or settings.control == "random":
        length = Window(settings.window_steps).length(planned_steps)
        steps = -(-steps // length) * length
    return max(1, steps)


def _require_known_warmup(settings: Settings, planned_steps: int | None) -> None:
    if planned_steps is None and settings.warmup_steps is None and settings.warmup > 0:
        raise UsageError(
            f"Invalid flag --warmup={settings.warmup:g}: the number of examples in {settings.data} "
            "is unknown, so a fraction of the steps is undefined. Expected --warmup_steps or "
            "--max_examples."
        )
