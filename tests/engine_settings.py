"""Builds engine settings from a flat list of names.

A setting has the name of the slipstream-train flag if there is one. `fraction` applies to every
policy that has this argument.
"""

from __future__ import annotations

from typing import Any

import slipstream_tf as slip
from slipstream_tf.engine.settings import EngineSettings

# Flat name -> field of the part.
_WINDOW = {
    "window_steps": "steps",
    **{name: name for name in ("warmup", "planned_steps", "sample", "seed")},
}
_HOT_SET = {
    "hot_set_memory": "memory",
    "exclude_tables": "exclude",
    **{name: name for name in ("table_memory", "count_decay")},
}
_SATURATION = {
    "drift_metric": "metric",
    **{name: name for name in ("threshold", "max_threshold", "revisit_every")},
}


def engine_arguments(*policies: str, **flat: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `Slipstream`.

    Args:
        *policies: "skip_examples" (with `RowDrift`), "defer_gradients" or "mask_gradients".
        **flat: Settings of these policies and of the engine. `random_fractions` adds a policy. A
            setting of a policy that is not in `policies` raises an error.
    """

    def take(names: dict[str, str]) -> dict[str, Any]:
        return {field: flat.pop(name) for name, field in names.items() if name in flat}

    fraction = {"fraction": flat.pop("fraction")} if "fraction" in flat else {}
    found: list[Any] = []
    for policy in policies:
        if policy == "skip_examples":
            score = slip.RowDrift(**take({"skip_alpha": "alpha"}))
            found.append(
                slip.SkipExamples(score, **fraction, **take({"skip_keep_rate": "keep_rate"}))
            )
        elif policy == "mask_gradients":
            decays = take({"mask_decay_moments": "decay_moments"})
            found.append(slip.MaskGradients(**fraction, **decays))
        elif policy == "defer_gradients":
            until: Any
            if flat.pop("defer_until", "movement") == "interval":
                until = slip.Interval(**fraction, **take({"defer_steps": "steps"}))
            else:
                names = {"defer_movement": "distance", "defer_max_age": "max_age"}
                until = slip.Movement(**take(names))
            found.append(slip.DeferGradients(until, **take({"defer_memory": "memory"})))
        else:
            raise ValueError(f"Unknown policy {policy!r}.")
    if "random_fractions" in flat:
        found.append(slip.baselines.SkipAtRandom(flat.pop("random_fractions")))
    window, hot_set, saturation = take(_WINDOW), take(_HOT_SET), take(_SATURATION)
    max_auc_loss, dry_run = flat.pop("max_auc_loss", None), flat.pop("dry_run", False)
    if flat:
        raise ValueError(f"Settings that belong to no given policy: {sorted(flat)}.")
    return {
        "policies": found,
        "window": slip.Window(**window),
        "hot_set": slip.HotSet(**hot_set),
        "saturation": slip.Saturation(**saturation) if saturation else None,
        "max_auc_loss": max_auc_loss,
        "dry_run": dry_run,
    }


def engine_settings(*policies: str, **flat: Any) -> EngineSettings:
    """Returns the settings of the tracker. See `engine_arguments` for the arguments."""
    return EngineSettings(**engine_arguments(*policies, **flat))
