"""Chooses settings by properties of the data, for flags that are not given.

`choose` is a pure function. Its constants follow runs on validation parts.
`benchmarks/default_settings.py` compares the choices with random searches; its page has the tasks
that were measured. Not measured: data of more than 250,000 examples, and optimizers of the rows
other than Adagrad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Maximum number of input values of DCN-v2, whose cross layers take time in proportion to its
# square: for small data, and for large data or an unknown number of examples.
_MAX_CROSSED_SMALL, _MAX_CROSSED = 1024, 256
# A pass has at least this number of steps, if batches of the minimum size allow it.
_MIN_STEPS, _MIN_BATCH, _MAX_BATCH = 500, 64, 1024
# Data with at most this number of training examples is small and has multiple passes. Early
# stopping needs this number of examples of the rarer label, and a tenth of the number in the
# validation part.
_MAX_SMALL, _MIN_RARER, _RARER_PER_VALID = 2_000_000, 1_000, 10
_MAX_PASSES, _PASSES_WITHOUT_VALIDATION, _PATIENCE = 10, 3, 1
_DIM = 16
# Maximum size of a training part that is shuffled in memory.
_MAX_SHUFFLED_BYTES = 1 << 30
# Learning rates of rows by optimizer. With few examples, a lower rate of Adagrad is better. The
# rates of other optimizers are estimates.
_ROWS_RATES = {
    "sgd": 1.0, "adagrad": 0.1, "rowwise_adagrad": 0.05, "adam": 0.001, "adamw": 0.001,
    "rowwise_adam": 0.001, "ftrl": 0.05,
}  # fmt: skip
_ADAGRAD_RATE_OF_FEW, _MAX_FEW = 0.05, 100_000
# A run with one of these flags has no early stopping by default, because it cannot have it, or
# because it is compared with other runs of as many examples.
WITHOUT_STOPPING = (
    "epochs", "max_examples", "evaluate_every", "checkpoint_every", "resume",
    "elastic", "prefetch", "policies", "dry_run", "watch", "control", "schedule",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Properties of a data set that are known before training.

    Attributes:
        name: Name of the data set, for example "criteo".
        fields: Number of key columns.
        num_dense: Number of numeric columns.
        bags: Number of key columns with lists.
        num_examples: Number of training examples, possibly estimated. None if unknown.
        click_rate: Fraction of the training labels that are 1. None if unknown.
        rarer_in_valid: Number of examples of the rarer label in the data's own validation part.
            None if there is no such part, so that a part of the training part is used.
        num_bytes: Size of the training part in memory, if the reader can shuffle it there. None if
            it cannot.
    """

    name: str
    fields: int
    num_dense: int = 0
    bags: int = 0
    num_examples: int | None = None
    click_rate: float | None = None
    rarer_in_valid: int | None = None
    num_bytes: int | None = None

    def __str__(self) -> str:
        count = self.num_examples
        parts = ["an unknown number of examples" if count is None else f"{count:,} examples"]
        if self.click_rate is not None:
            parts.append(f"{self.click_rate:.3g} of them clicked")
        bags = f" ({self.bags} of them bags)" if self.bags else ""
        numbers = "1 number" if self.num_dense == 1 else f"{self.num_dense or 'no'} numbers"
        return ", ".join([*parts, f"{self.fields} key columns{bags}", numbers])


def choose(
    facts: DataFacts, given: Mapping[str, Any], may_stop_early: bool = True, ranks: int = 1
) -> dict[str, tuple[Any, str]]:
    """Chooses the settings that depend on the data.

    Args:
        facts: Properties of the data.
        given: Settings by name that the user has given. They are not chosen, and other choices
            depend on them.
        may_stop_early: Whether early stopping may be chosen, see `WITHOUT_STOPPING`.
        ranks: Number of ranks. They share the batch, so that a step has as many examples as in a
            single process.

    Returns:
        Value and reason of each chosen setting that is not given, by name.
    """
    optimizer = given.get("rows_optimizer", "adagrad")
    counts = [n for n in (facts.num_examples, given.get("max_examples")) if n is not None]
    count = min(counts, default=None)
    passes = _passes(count, facts, may_stop_early)
    stops = given.get("early_stopping", "early_stopping" in passes)
    trained = count
    if count and stops and facts.rarer_in_valid is None:
        trained = count - count // 10  # The rest is for validation.
    found: dict[str, tuple[Any, str]] = {
        "model": _model(facts, count, given),
        "batch_size": _batch_size(trained, ranks),
        "rows_learning_rate": _rows_rate(optimizer, count),
        **passes,
    }
    if facts.num_bytes is not None and facts.num_bytes <= _MAX_SHUFFLED_BYTES:
        reason = f"prepared data, {facts.num_bytes / 2**20:,.0f} MiB in memory"
        found["shuffle"] = ("examples", reason)
    if given.get("early_stopping"):
        found["epochs"] = (_MAX_PASSES, "early stopping")
    return {name: choice for name, choice in found.items() if name not in given}


def _model(facts: DataFacts, count: int | None, given: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the model that the given layers belong to or that suits the width of the data."""
    for flag, model in (("bottom", "dlrm"), ("cross_layers", "dcn")):
        if flag in given:
            return model, f"--{flag}"
    width = facts.fields * given.get("dim", _DIM) + facts.num_dense
    is_small = count is not None and count <= _MAX_SMALL
    limit = _MAX_CROSSED_SMALL if is_small else _MAX_CROSSED
    if width <= limit:
        return "dcn", f"{width} values per example, at most {limit:,}"
    return "dlrm", f"{width} values per example, more than {limit:,}"


def _batch_size(count: int | None, ranks: int) -> tuple[int, str]:
    """Returns the examples per step on each rank, and the reason.

    The examples per step on all ranks are the largest power of two that leaves enough steps in a
    pass.
    """
    if count is None:
        size, reason = _MAX_BATCH, "an unknown number of examples"
    else:
        largest = 1 << (max(count // _MIN_STEPS, 1).bit_length() - 1)
        size = min(max(largest, _MIN_BATCH), _MAX_BATCH)
        reason = f"{-(-count // size):,} steps in a pass"
    if ranks == 1:
        return size, reason
    return max(size // ranks, 1), f"{reason}; {size:,} examples in a step of {ranks} ranks"


def _rows_rate(optimizer: str, count: int | None) -> tuple[float, str]:
    """Returns the learning rate of the rows, and the reason."""
    if optimizer == "adagrad" and count is not None and count <= _MAX_FEW:
        return _ADAGRAD_RATE_OF_FEW, f"{optimizer}, at most {_MAX_FEW:,} examples"
    return _ROWS_RATES[optimizer], optimizer


def _passes(
    count: int | None, facts: DataFacts, may_stop_early: bool
) -> dict[str, tuple[int, str]]:
    """Returns the choice of `epochs` and `early_stopping`."""
    click_rate = facts.click_rate
    if not may_stop_early:
        return {"epochs": (1, "a run with policies, a control, limits or checkpoints")}
    if count is None or click_rate is None:
        return {"epochs": (1, "an unknown number of examples or clicks")}
    if count > _MAX_SMALL:
        return {"epochs": (1, f"more than {_MAX_SMALL:,} examples")}
    rarer = count * min(click_rate, 1 - click_rate)
    if facts.rarer_in_valid is not None:
        rarer = min(rarer, facts.rarer_in_valid * _RARER_PER_VALID)
    if rarer < _MIN_RARER:
        reason = "too few examples of a label for early stopping"
        return {"epochs": (_PASSES_WITHOUT_VALIDATION, reason)}
    reason = f"at most {_MAX_SMALL:,} examples"
    part = (
        ""
        if facts.rarer_in_valid is not None
        else "; a tenth of the training examples is for validation"
    )
    return {
        "epochs": (_MAX_PASSES, f"{reason}; training stops when the validation AUC falls"),
        "early_stopping": (_PATIENCE, f"{reason}, in up to {_MAX_PASSES} passes{part}"),
    }
