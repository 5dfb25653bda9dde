"""Builds what a run trains: embedding tables, the model and its optimizers, from settings."""

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
from slipstream_tf.cli.train_flags import foresees
from slipstream_tf.config import DryRun, HotSet, Retention, Saturation, Storage, Table, Window
from slipstream_tf.distributed import Communicator, DistributedOptimizer
from slipstream_tf.keras import EmbeddingCollection, Slipstream
from slipstream_tf.keras.loss_feedback import binary_cross_entropy
from slipstream_tf.models import DLRM, DCNv2, DeepFM
from slipstream_tf.policies.base import Policy

_MOST_AT_ONCE = 16


def build_embeddings(
    settings: Settings,
    fields: tuple[str, ...],
    comm: Communicator,
    planned_steps: int | None = None,
    hot_keys: Sequence[Any] | None = None,
) -> EmbeddingCollection:
    """Makes a table per field.

    Args:
        settings: of the run.
        fields: names of the categorical fields, in the order of the key columns.
        comm: the ranks that train them; making the tables is a collective.
        planned_steps: as of `build_engine`.
        hot_keys: of each field, where a baseline's schedule has them.

    Returns:
        The layer.
    """
    if settings.wire_dtype != "float32":
        _require_known_warmup(settings, planned_steps)
    half_width, retention = settings.rows_init, None
    storage = Storage(settings.row_dtype, settings.slot_dtype, settings.memory, settings.spill)
    if settings.capacity is not None:
        retention = Retention(settings.capacity, settings.eviction)
    tables = [
        Table(
            field,
            settings.dim,
            # Of their own: the same run has the same rows, whatever its fields are called.
            initializer=initializers.RandomUniform(
                -half_width, half_width, settings.seed * len(fields) + index
            ),
            retention=retention,
            storage=storage,
        )
        for index, field in enumerate(fields)
    ]
    if hot_keys is not None and (settings.schedule == "hotline" or comm.size > 1):
        rule = _rows_optimizer(settings)
        return HotRows(tables, rule, hot_keys, comm, dtype=settings.precision)
    return EmbeddingCollection(
        tables,
        _rows_optimizer(settings),
        comm=comm,
        placement=settings.placement,
        wire_dtype=settings.wire_dtype,
        wire_warmup_steps=warmup_steps(settings, planned_steps),
        prefetch=settings.prefetch,
        dtype=settings.precision,
    )


def _rows_optimizer(settings: Settings) -> optimizers.SparseOptimizer:
    rule = optimizers.get(settings.rows_optimizer)
    chosen: dict[str, Any] = {"learning_rate": settings.rows_learning_rate}
    if settings.rows_l2:
        chosen["l2"] = settings.rows_l2
    if settings.rows_l2 or rule.weight_decay:
        chosen["decay"] = settings.rows_decay
    return dataclasses.replace(rule, **chosen)


def build_model(
    settings: Settings,
    embeddings: EmbeddingCollection,
    num_dense: int,
    comm: Communicator,
) -> Any:
    """Makes and compiles the model; its output is a logit.

    Args:
        settings: of the run.
        embeddings: the tables.
        num_dense: numeric features per example.
        comm: the ranks over which gradients are averaged.

    Raises:
        UsageError: batch normalisation on several ranks.

    Returns:
        A compiled `keras.Model` with the metrics loss, auc and trained (examples); where examples
        are thinned, `callbacks.LOG_LOSS`, too.
    """
    if settings.batch_norm and comm.size > 1:
        raise UsageError(
            "Invalid flag --batch_norm on multiple ranks: their averages would differ. "
            "Allowed: --nobatch_norm."
        )
    common: dict[str, Any] = {
        "dropout": settings.dropout,
        "returns_logits": True,
        "batch_norm": settings.batch_norm,
        "dtype": settings.precision,
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
    optimizer: Any = keras.optimizers.Adam(settings.learning_rate)
    if comm.size > 1:
        optimizer = DistributedOptimizer(optimizer, comm)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    auc: Any = keras.metrics.AUC(from_logits=True, name="auc")
    trained: Any = InputCount(name="trained")
    metrics: dict[str, Any] = {"metrics": [auc, trained]}
    if foresees(settings):
        # Of what is kept, weighed: as of all examples. Keras's own loss grows with the weights.
        log_loss = keras.metrics.MeanMetricWrapper(_log_loss, name=LOG_LOSS)
        metrics = {"weighted_metrics": [auc, log_loss, trained]}
    model.compile(optimizer, loss, **metrics)
    return model


def steps_per_execution(settings: Settings, *ends: int | None) -> int:
    """Returns how many steps are one call of TensorFlow: what Python does between costs a quarter.

    Args:
        settings: of the run; `window_steps` must be known.
        ends: steps after which, again and again, Python has something to do; 0 or None: never.

    Returns:
        At most 16; a divisor of all of these.
    """
    windows = settings.window_steps if settings.uses_engine else None
    common = math.gcd(*(steps or 0 for steps in (windows, settings.evaluate_every, *ends)))
    return max(n for n in range(1, _MOST_AT_ONCE + 1) if common % n == 0)


def _log_loss(labels: Any, logits: Any) -> Any:
    """The loss of each example, [batch]; labels are [batch], logits [batch, 1]."""
    return binary_cross_entropy(tf.cast(tf.reshape(labels, [-1]), tf.float32), logits, True)


def build_engine(
    settings: Settings, embeddings: EmbeddingCollection, planned_steps: int | None
) -> Slipstream | None:
    """Makes the saturation engine, or None where the run has none.

    Args:
        settings: of the run.
        embeddings: the tables.
        planned_steps: steps if nothing were skipped, or None if that is not known; only used for
            the warm-up as a share.

    Raises:
        UsageError: its warm-up is a share of steps whose number is not known.
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
    """Returns the policies of a run, in the order of --policies."""
    engine = settings.engine
    found: list[Policy] = []
    for name in settings.policies:
        if name == "defer_gradients":
            limits = _given(engine, distance="defer_movement", max_age="defer_max_age")
            found.append(policies.DeferGradients(policies.Movement(**limits)))
        elif name == "mask_gradients":
            found.append(policies.MaskGradients(**_given(engine, share="mask_share")))
        else:
            score: Any = RowDrift(engine["skip_alpha"])
            if foresees(settings):
                score = policies.ForeseenLoss(**_given(engine, pilot="pilot"))
            shares = _given(engine, share="skip_share", keep="skip_keep")
            found.append(policies.SkipExamples(score, **shares))
    if settings.control == "random":
        found.append(SkipAtRandom(settings.random_shares))
    return found


def _given(engine: Mapping[str, Any], **flags: str) -> dict[str, Any]:
    """Returns the arguments whose flags were given; `flags`: argument -> flag."""
    return {argument: engine[flag] for argument, flag in flags.items() if flag in engine}


def validation_steps(settings: Settings, num_examples: int | None, ranks: int) -> int:
    """Returns the steps between measurements of the validation part: those of an epoch.

    Raises:
        UsageError: they are not known, or the run ends before the second measurement.
    """
    steps = settings.evaluate_every
    if steps is None and num_examples is not None:
        steps = math.ceil(num_examples / (settings.batch_size * ranks))
    if steps is None:
        raise UsageError(
            f"Invalid flag --early_stopping={settings.early_stopping}: how many examples the data "
            "has is not known, so neither is an epoch's end. Give --evaluate_every."
        )
    planned = planned_steps(settings, num_examples, ranks)
    if planned is not None and planned < 2 * steps:
        raise UsageError(
            f"Invalid flag --early_stopping={settings.early_stopping}: the run has {planned:,} "
            f"steps, and is measured every {steps:,}: it cannot stop. Allowed: more --epochs, a "
            "smaller --evaluate_every, or --early_stopping=0."
        )
    return steps


def planned_inputs(settings: Settings, num_examples: int | None) -> int | None:
    """Returns the examples that will come in, over all epochs; None if the reader cannot tell."""
    of_all_epochs = None if num_examples is None else num_examples * settings.epochs
    limits = (settings.max_examples, settings.stop_after, of_all_epochs)
    return min((n for n in limits if n is not None), default=None)


def planned_steps(settings: Settings, num_examples: int | None, ranks: int) -> int | None:
    """Returns the steps of the job, over all epochs; None if the reader cannot tell."""
    planned = planned_inputs(settings, num_examples)
    return None if planned is None else math.ceil(planned / (settings.batch_size * ranks))


def warmup_steps(settings: Settings, planned_steps: int | None) -> int:
    """Returns the steps of the warm-up; by `planned_steps`, where they are a share of these."""
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return round(settings.warmup * (planned_steps or 0))


def steps_before_skipping(settings: Settings, planned_steps: int | None) -> int:
    """Returns those of the warm-up, at least 1; with skipping, up to the end of its last window."""
    steps = warmup_steps(settings, planned_steps)
    if settings.policies or settings.control == "random":
        length = Window(settings.window_steps).length(planned_steps)
        steps = -(-steps // length) * length
    return max(1, steps)


def _require_known_warmup(settings: Settings, planned_steps: int | None) -> None:
    if planned_steps is None and settings.warmup_steps is None and settings.warmup > 0:
        raise UsageError(
            f"Invalid flag --warmup={settings.warmup:g}: how many examples the data has is not "
            "known, so a share of the steps is not, either. Give --warmup_steps or --max_examples."
        )
