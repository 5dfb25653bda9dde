"""From flags to policies: the arguments of `Slipstream`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream_tf.baselines import RowDrift, SkipAtRandom
from slipstream_tf.cli.settings import Settings
from slipstream_tf.config import DryRun, HotSet, Saturation
from slipstream_tf.policies import (
    DeferGradients,
    ForeseenLoss,
    MaskGradients,
    Movement,
    Policy,
    SkipExamples,
)

_SAME = ("threshold", "max_threshold", "revisit_every")
_SATURATION = {"metric": "drift_metric", **{name: name for name in _SAME}}


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """Returns the arguments of `Slipstream` but for layer and window, from a run's settings."""
    engine = settings.engine
    saturation = _given(engine, _SATURATION)
    return {
        "policies": policies_of(settings),
        "hot_set": HotSet(
            **_given(engine, {"memory": "hot_set_memory", "exclude": "exclude_tables"})
        ),
        "saturation": Saturation(**saturation) if saturation else None,
        "max_auc_loss": engine.get("max_auc_loss"),
        "dry_run": DryRun(estimates_cost=True) if settings.dry_run else False,
    }


def policies_of(settings: Settings) -> list[Policy]:
    """Returns the policies of a run, in the order in which they were named."""
    makers = {
        "skip_examples": _skip_examples,
        "defer_gradients": _defer_gradients,
        "mask_gradients": _mask_gradients,
    }
    found: list[Policy] = [makers[name](settings.engine) for name in settings.policies]
    if settings.control == "random":
        found.append(SkipAtRandom(settings.random_shares))
    return found


def _skip_examples(engine: Mapping[str, Any]) -> Policy:
    score: Any = RowDrift(engine["skip_alpha"])
    if engine["skip_by"] == "foreseen_loss":
        names = {"pilot": "pilot", "correct": "correct", "floor": "floor"}
        names.update(factors="pilot_factors", memory="pilot_memory")
        score = ForeseenLoss(**_given(engine, names))
    return SkipExamples(score, **_given(engine, {"share": "skip_share", "keep": "skip_keep"}))


def _defer_gradients(engine: Mapping[str, Any]) -> Policy:
    names = {"distance": "defer_movement", "max_age": "defer_max_age"}
    return DeferGradients(Movement(**_given(engine, names)))


def _mask_gradients(engine: Mapping[str, Any]) -> Policy:
    names = {"share": "mask_share", "decay_moments": "mask_decay_moments"}
    return MaskGradients(**_given(engine, names))


def _given(engine: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The arguments whose flags were given; `names`: argument -> flag."""
    return {argument: engine[flag] for argument, flag in names.items() if flag in engine}
