"""Sparse optimizers, which update only the rows that a batch looks up.

An optimizer belongs to a table and runs during the backward pass. If a key occurs more than once in
a batch, its gradients are summed in a fixed order and the update rule is applied once. Keras's
Adagrad, Adam, AdamW and Ftrl square each gradient of a repeated key separately, so that their rows
differ then. Rows that the batch does not contain stay unchanged, unless `decay="all"` decays them.
Each optimizer is a class in `rules.py` with an update rule in C++ in `cc_ops/core/update/rules/`.
"""

from collections.abc import Sequence
from typing import Any

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.serialization import deserialize
from slipstream_tf.optimizers.base import SparseOptimizer
from slipstream_tf.optimizers.rules import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    RowWiseAdagrad,
    RowWiseAdam,
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "SparseOptimizer",
    "get",
    "serialize",
]

CLASSES = (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, RowWiseAdam, Ftrl)
NAMES = tuple(cls.rule for cls in CLASSES)  # names that `get` accepts
# Keras optimizers that the classes here reproduce for the rows of a batch without repeated keys,
# without moving other rows: the class, and the names of the settings to copy.
_SAME_AS_KERAS = {
    "SGD": (SGD, ()),
    "Adagrad": (Adagrad, ("initial_accumulator_value", "epsilon")),
}
# Settings of Keras optimizers that `get` rejects.
_BEYOND = (
    *("momentum", "nesterov", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm"),
    *("use_ema", "loss_scale_factor", "gradient_accumulation_steps"),
)


def get(identifier: Any) -> SparseOptimizer:
    """Returns a sparse optimizer from a name, config or Keras optimizer.

    Example:

    >>> slip.optimizers.get("sgd").learning_rate == slip.optimizers.SGD().learning_rate
    True

    Args:
        identifier: A `SparseOptimizer`; a dictionary returned by `serialize`; a name such as
            "adagrad", for an optimizer with its defaults; or a `keras.optimizers.SGD` or
            `keras.optimizers.Adagrad`, which updates the rows of a batch in the same way; with
            Adagrad only if no key is repeated in the batch.

    Raises:
        ValueError: The identifier is anything else. For example, `keras.optimizers.Adam` is
            rejected because it also moves rows that the batch does not contain. The message lists
            the alternatives.
    """
    names = {cls.__name__.lower(): cls for cls in CLASSES} | {cls.rule: cls for cls in CLASSES}
    if isinstance(identifier, str) and identifier.lower() in names:
        return names[identifier.lower()]()
    found = _compat.keras_object(identifier, "optimizers", "Optimizer")
    if found is not None:
        return _of_keras(*found)
    return deserialize("optimizer", identifier, CLASSES, "optimizers", "embedding tables")


def _of_keras(name: str, config: dict[str, Any]) -> SparseOptimizer:
    place = "embedding tables"
    if name not in _SAME_AS_KERAS:
        names = ", ".join(f"{cls.__name__}(...)" for cls in CLASSES)
        allowed = f"slipstream_tf.optimizers.{names}, which update only the rows of a batch"
        raise invalid("optimizer", f"keras.optimizers.{name}", place, allowed)
    cls, settings = _SAME_AS_KERAS[name]
    for setting in _BEYOND:
        if config.get(setting):
            at = f"keras.optimizers.{name} of {place}"
            allowed = f"no `{setting}`. Remove it, or use slipstream_tf.optimizers.{name}(...)"
            raise invalid(setting, config[setting], at, allowed)
    return cls(config["learning_rate"], **{setting: config[setting] for setting in settings})


def serialize(optimizer: SparseOptimizer) -> dict[str, Any]:
    """Returns a JSON-serializable dictionary with "class_name" and "config".

    A learning rate variable is replaced by its current value.

    Example:

    >>> slip.optimizers.serialize(slip.optimizers.SGD(0.5))["class_name"]
    'SGD'
    """
    return {"class_name": type(optimizer).__name__, "config": optimizer.get_config()}


def optimizer_of(table: Any, optimizer: Any) -> SparseOptimizer:
    """Returns the optimizer of a `Table`, or the default.

    Args:
        table: The `Table`.
        optimizer: Default for tables without an optimizer, in any format that `get` accepts. None
            means `Adagrad` with its defaults.
    """
    if table.optimizer is not None:
        return get(table.optimizer)
    return Adagrad() if optimizer is None else get(optimizer)


def shared_optimizer(tables: Sequence[Any], optimizer: Any, place: str) -> SparseOptimizer:
    """Returns the optimizer that all tables share.

    Args:
        tables: The `Table`s, at least one.
        optimizer: Default for tables without an optimizer, as in `optimizer_of`.
        place: Name of the caller for the error message.

    Raises:
        ValueError: The tables have different optimizers.
    """
    chosen = [optimizer_of(table, optimizer) for table in tables]
    if any(serialize(own) != serialize(chosen[0]) for own in chosen):
        by_table = {table.name: own for table, own in zip(tables, chosen, strict=True)}
        allowed = "the same optimizer and learning rate for all tables"
        raise invalid("optimizer", by_table, place, allowed)
    return chosen[0]
