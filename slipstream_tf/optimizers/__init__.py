"""Sparse optimizers: they belong to the tables of a store and run inside the backward pass.

Gradients of a key that occurs several times in a batch are summed, in a fixed order, before the
rule is applied once. Rows absent from a batch are left as they are. A rule is a class in `rules.py`
and a file of its arithmetic in C++, `cc_ops/core/update/rules/`.
"""

import dataclasses
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

_RULES = (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, RowWiseAdam, Ftrl)
NAMES = tuple(cls.rule for cls in _RULES)  # as `get` takes them
# Of `keras.optimizers`: rows of a batch move exactly as by these rules, absent rows not at all.
_SAME_AS_KERAS = {
    "SGD": (SGD, ()),
    "Adagrad": (Adagrad, ("initial_accumulator_value", "epsilon")),
}
# Settings of Keras optimizers that a rule here does not have, where they do something.
_BEYOND = (
    *("momentum", "nesterov", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm"),
    *("use_ema", "loss_scale_factor", "gradient_accumulation_steps"),
)


def get(identifier: Any) -> SparseOptimizer:
    """Returns a sparse optimizer.

    Args:
        identifier: an instance; the dictionary that `serialize` made; a name such as "adagrad", for
            a rule with its defaults; or a `keras.optimizers.SGD` or `Adagrad`, whose rows move
            exactly as those of the rule here.

    Raises:
        ValueError: anything else. `keras.optimizers.Adam` and others move the rows that are absent
            from a batch, too: the error names the rules.
    """
    names = {cls.__name__.lower(): cls for cls in _RULES} | {cls.rule: cls for cls in _RULES}
    if isinstance(identifier, str) and identifier.lower() in names:
        return names[identifier.lower()]()
    found = _compat.keras_object(identifier, "optimizers", "Optimizer")
    if found is not None:
        return _of_keras(*found)
    return deserialize("optimizer", identifier, _RULES, "optimizers", "embedding tables")


def _of_keras(name: str, config: dict[str, Any]) -> SparseOptimizer:
    place = "embedding tables"
    if name not in _SAME_AS_KERAS:
        rules = ", ".join(f"{cls.__name__}(...)" for cls in _RULES)
        allowed = f"slipstream_tf.optimizers.{rules}, which leave rows that a batch lacks alone"
        raise invalid("optimizer", f"keras.optimizers.{name}", place, allowed)
    rule, settings = _SAME_AS_KERAS[name]
    for setting in _BEYOND:
        if config.get(setting):
            allowed = f"a keras.optimizers.{name} without it, or slipstream_tf.optimizers.{name}"
            raise invalid(setting, config[setting], f"keras.optimizers.{name} of {place}", allowed)
    return rule(config["learning_rate"], **{setting: config[setting] for setting in settings})


def serialize(optimizer: SparseOptimizer) -> dict[str, Any]:
    """Returns {"class_name", "config"} for JSON; of a variable the rate is what it is now."""
    config = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)}
    rate = optimizer.learning_rate
    if _compat.is_schedule(rate):
        saving = _compat.require_keras().saving
        config["learning_rate"] = dict(saving.serialize_keras_object(rate))
    elif not isinstance(rate, float):
        config["learning_rate"] = float(_compat.tensorflow_variable(rate).numpy())
    return {"class_name": type(optimizer).__name__, "config": config}


def rule_of(table: Any, optimizer: Any) -> SparseOptimizer:
    """Returns the rule of a `Table`: its own, or that of its store.

    Args:
        table: the table.
        optimizer: of the tables without one of their own; None: `Adagrad` with its defaults.
    """
    if table.optimizer is not None:
        return get(table.optimizer)
    return Adagrad() if optimizer is None else get(optimizer)


def the_one_of(tables: Sequence[Any], optimizer: Any, place: str) -> SparseOptimizer:
    """Returns the rule that all tables share.

    Raises:
        ValueError: they have several, which `place` cannot have.
    """
    rules = [rule_of(table, optimizer) for table in tables]
    if any(serialize(rule) != serialize(rules[0]) for rule in rules):
        told = {table.name: rule for table, rule in zip(tables, rules, strict=True)}
        raise invalid("optimizer", told, place, "the same rule and rate for all tables")
    return rules[0]
