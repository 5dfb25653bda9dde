"""Flags of the saturation engine beyond the paper's, in one list.

They carry the names of `SaturationConfig`'s fields, whose defaults hold where a flag is not given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from slipstream_tf.cli.flag_set import Choice, FlagSet, Integer, Names, Number, UsageError
from slipstream_tf.saturation_config import DEFER_TRIGGERS, SCORES, SaturationConfig

SKIP_CHOICES = ("none", "inputs", "gradients", "defer", "both", "inputs+gradients")


@dataclasses.dataclass(frozen=True)
class EngineFlag:
    """One flag.

    Attributes:
        parser: of its values; None: a switch.
        text: for --help; of a number, in which unit.
        needs: flags that must be so for it to matter, in words.
        matters: whether it does, given the chosen skip mode ("track": --skip=none with --track)
            and the other engine flags.
    """

    parser: Any
    text: str
    needs: str
    matters: Callable[[str, Mapping[str, Any]], bool]


def _by_inputs(skip: str, chosen: Mapping[str, Any]) -> bool:
    return skip in ("inputs", "both", "inputs+gradients")


def _by_defer(skip: str, chosen: Mapping[str, Any]) -> bool:
    return skip in ("defer", "both")


def _trigger(name: str) -> Callable[[str, Mapping[str, Any]], bool]:
    def matters(skip: str, chosen: Mapping[str, Any]) -> bool:
        trigger = chosen.get("defer_trigger", SaturationConfig.defer_trigger)
        return _by_defer(skip, chosen) and trigger == name

    return matters


def _by_loss(skip: str, chosen: Mapping[str, Any]) -> bool:
    return _by_inputs(skip, chosen) and chosen.get("score") == "remembered_loss"


def _by_states(skip: str, chosen: Mapping[str, Any]) -> bool:
    return _by_any(skip, chosen) and (skip != "defer" or _trigger("interval")(skip, chosen))


def _by_any(skip: str, chosen: Mapping[str, Any]) -> bool:
    return skip not in ("none", "track")


def _by_tracking(skip: str, chosen: Mapping[str, Any]) -> bool:
    return skip != "none"


# How --help tells the default of what is None by default.
_DEFAULTS = {
    "threshold": "by --target_skip",
    "revisit_every": "10 where gradients are withheld, 100 where inputs are skipped, 0 with losses",
    "max_auc_loss": "no bound",
    "max_log_loss_increase": "no bound",
    "guard_tolerance": "no guard",
    "freeze_drift": "0.25 * --rows_learning_rate",
    "defer_movement": "0.05 * --rows_learning_rate",
    "exempt_tables": "none",
}
_INPUTS, _DEFER = "--skip=inputs or both", "--skip=defer or both"
_LOSS = "--score=remembered_loss"
_STATES = "a --skip that judges keys (inputs, gradients, both, or --defer_trigger=interval)"
_SKIP = "a --skip other than none"
_TRACKING = "a --skip other than none, or --track"
ENGINE_FLAGS: Mapping[str, EngineFlag] = {
    "score": EngineFlag(
        Choice(SCORES), "what makes an input skippable: its keys' drift (paper), or its last loss",
        _INPUTS, _by_inputs,
    ),
    "saturated_share": EngineFlag(
        Number(0, 1), "share of the hot inputs whose keys count as saturated", _LOSS, _by_loss
    ),
    "max_skips": EngineFlag(
        Integer(0, 127), "skips after which an input is trained on again; 0: no limit",
        _LOSS, _by_loss,
    ),
    "keep_rate": EngineFlag(
        Number(0, 0.999), "share of skippable inputs that is kept, with weight 1 / keep_rate",
        _INPUTS, _by_inputs,
    ),
    "threshold": EngineFlag(
        Number(0), "T itself, in the unit of --metric, instead of a share of inputs",
        _STATES, _by_states,
    ),
    "release": EngineFlag(
        Number(1), "factor on T up to which a saturated key's drift may rise before it varies",
        _STATES, _by_states,
    ),
    "revisit_every": EngineFlag(
        Integer(0), "windows from probe to probe of a saturated key; 0: never", _STATES, _by_states
    ),
    "protect_windows": EngineFlag(
        Integer(1), "windows before a key that became hot is judged", _STATES, _by_states
    ),
    "guard_tolerance": EngineFlag(
        Number(0), "rise of the kept inputs' loss at which T is halved, as a share of that loss",
        _STATES, _by_states,
    ),
    "max_auc_loss": EngineFlag(
        Number(0, 1, True), "most AUC that skipping may cost, by the budget's estimate",
        _SKIP, _by_any,
    ),
    "max_log_loss_increase": EngineFlag(
        Number(0, open_minimum=True), "the same in log loss", _STATES, _by_states
    ),
    "defer_trigger": EngineFlag(
        Choice(DEFER_TRIGGERS), "movement: hold any row's gradients until they would move it; "
        "interval: hold those of saturated rows", _DEFER, _by_defer,
    ),
    "freeze_drift": EngineFlag(
        Number(0), "drift below which saturated rows are read from copies (sharded), in the unit "
        "of --metric; 0: none",
        _SKIP, _by_any,
    ),
    "defer_movement": EngineFlag(
        Number(0, open_minimum=True), "gradients of a row are held until they would move it by "
        "this, in the unit of the rows", "--defer_trigger=movement", _trigger("movement"),
    ),
    "defer_max_age": EngineFlag(
        Integer(1), "most steps that a sum is held", "--defer_trigger=movement",
        _trigger("movement"),
    ),
    "defer_steps": EngineFlag(
        Integer(1), "steps that a sum is held", "--defer_trigger=interval", _trigger("interval")
    ),
    "simulated_ranks": EngineFlag(
        Integer(1, 64), "count rows as if so many ranks shared each batch",
        _TRACKING, _by_tracking,
    ),
    "exempt_tables": EngineFlag(
        Names(), "tables that are neither tracked nor skipped", _TRACKING, _by_tracking
    ),
    "decay_skipped": EngineFlag(
        None, "masking a row's gradient decays its moments (Adam)", "--skip=gradients",
        lambda skip, chosen: skip in ("gradients", "inputs+gradients"),
    ),
    "shadow": EngineFlag(
        None, "skip nothing, and tell what --skip (inputs and defer if it is not given) would have "
        "saved, at what estimated cost", _SKIP + ", or without a --skip", _by_any
    ),
}  # fmt: skip


def add_to(flags: FlagSet) -> None:
    """Adds the flags to a program's."""
    for name, flag in ENGINE_FLAGS.items():
        if flag.parser is None:
            flags.add_switch(name, flag.text)
        else:
            text = _DEFAULTS.get(name) or str(getattr(SaturationConfig, name))
            flags.add(name, flag.parser, None, flag.text, text)


def choose(values: Mapping[str, Any], given: frozenset[str], skip: str) -> dict[str, Any]:
    """Collects the given flags, as settings of `SaturationConfig`.

    Args:
        values: by flag, as parsed.
        given: flags that stand on the command line.
        skip: the chosen skip mode, or "track".

    Raises:
        UsageError: one does nothing with the other settings.
    """
    chosen = {name: values[name] for name in ENGINE_FLAGS if name in given}
    for name in chosen:
        if not ENGINE_FLAGS[name].matters(skip, chosen):
            needs = ENGINE_FLAGS[name].needs
            raise UsageError(f"Flag --{name} does nothing here. Allowed: with {needs}.")
    return chosen
