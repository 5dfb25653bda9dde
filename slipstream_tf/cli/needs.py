"""What a flag of `slipstream-train` needs to matter: one that does nothing is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from slipstream_tf._utils import agent

# `cli.settings.Settings`, which is built on the flags, and they on this.
Settings = Any


class Need(NamedTuple):
    """What a flag needs to matter.

    Attributes:
        words: flags that must be so, or other conditions.
        is_met: whether they are.
    """

    words: str
    is_met: Callable[[Settings], bool]


def _saves(policy: str) -> Callable[[Settings], bool]:
    return lambda settings: policy in settings.policies


def _skips_by(score: str) -> Callable[[Settings], bool]:
    return lambda settings: (
        "skip_examples" in settings.policies and settings.engine["skip_by"] == score
    )


foresees = _skips_by("foreseen_loss")
"""Whether examples are skipped by what a pilot foresees."""


def has_pilot(*pilots: str) -> Callable[[Settings], bool]:
    """Returns what tells whether one of these pilots foresees losses."""
    return lambda settings: foresees(settings) and settings.engine.get("pilot", "fm") in pilots


def goes_by_keys(settings: Settings) -> bool:
    """Whether it matters which keys are saturated."""
    if settings.control == "random":
        return False
    by_keys = {"skip_examples", "mask_gradients"} & set(settings.policies)
    if foresees(settings):
        by_keys -= {"skip_examples"}
    return bool(by_keys) or settings.watch


def _is_steered(settings: Settings) -> bool:
    steered = {"mask_gradients", "defer_gradients"}
    return bool(
        (steered if foresees(settings) else {"skip_examples", *steered}) & set(settings.policies)
    )


def _is_sharded(settings: Settings) -> bool:
    return settings.placement == "sharded"


WATCHING = Need(
    "--policies or --watch",
    lambda settings: settings.uses_engine and settings.control != "random",
)
WINDOWS = Need(WATCHING.words, lambda settings: settings.uses_engine)
WARMUP = Need(
    WATCHING.words, lambda settings: settings.uses_engine or settings.wire_dtype != "float32"
)
POLICIES = Need("--policies", _is_steered)
EXAMPLES = Need("--policies=skip_examples", _saves("skip_examples"))
BY_KEYS = Need("--skip_by=row_drift", _skips_by("row_drift"))
FORESEEN_LOSS = Need("--skip_by=foreseen_loss", foresees)
KEY_PILOT = Need("--pilot=fm or linear", has_pilot("fm", "linear"))
FM_PILOT = Need("--pilot=fm", has_pilot("fm"))
DEFER = Need("--policies=defer_gradients", _saves("defer_gradients"))
MASK = Need("--policies=mask_gradients", _saves("mask_gradients"))
SGD = Need("--rows_optimizer=sgd", lambda settings: settings.rows_optimizer == "sgd")
MOMENTS = Need(
    "--rows_optimizer=adam, adamw or rowwise_adam, or --rows_momentum",
    lambda settings: "adam" in settings.rows_optimizer or settings.rows_momentum > 0,
)
KEYS = Need("--policies that go by drift, or --watch", goes_by_keys)
HOT_SET = Need(
    KEYS.words,
    lambda settings: goes_by_keys(settings) or settings.schedule != "plain",
)
NO_THRESHOLD = Need(
    "no --threshold, which decides it",
    lambda settings: settings.engine.get("threshold") is None or foresees(settings),
)
NO_AUC_BOUND = Need(
    "no --max_auc_loss, which decides it",
    lambda settings: settings.engine.get("max_auc_loss") is None,
)
NO_POLICY = Need(
    "no --policies and no --control=random",
    lambda settings: not settings.policies and settings.control != "random",
)
NO_SAVING = Need(
    "no --policies and --control=none",
    lambda settings: not settings.policies and settings.control == "none",
)
RANKS = Need(
    "several ranks, started by horovodrun or mpirun", lambda settings: agent.rank() is not None
)
ONE_PROCESS = Need("one process", lambda settings: agent.rank() is None or not settings.batch_norm)
SHARDED = Need("--placement=sharded", _is_sharded)
NO_PREFETCH = Need(
    # What was sent ahead would be sent once more, and count.
    "no --prefetch",
    lambda settings: agent.rank() is None or not settings.prefetch,
)
ROUNDED = Need("a --wire_dtype that rounds", lambda settings: settings.wire_dtype != "float32")
PARQUET = Need(
    "Parquet data that slipstream-prepare did not write",
    lambda settings: settings.data_name == "parquet",
)
STOPPING = Need("--early_stopping", lambda settings: settings.early_stopping > 0)
DECAYING = Need(
    "--rows_l2 or --rows_weight_decay",
    lambda settings: bool(
        settings.rows_l2 or settings.rows_weight_decay or settings.rows_optimizer == "adamw"
    ),
)
MEMORY = Need("--memory", lambda settings: settings.memory is not None)
SPILL = Need("--spill", lambda settings: settings.spill is not None)
CAPACITY = Need("--capacity", lambda settings: settings.capacity is not None)
DLRM = Need("--model=dlrm", lambda settings: settings.model == "dlrm")
DCN = Need("--model=dcn", lambda settings: settings.model == "dcn")
