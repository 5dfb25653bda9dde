"""Gradients of saturated keys are thrown away."""

import dataclasses
from typing import Any

from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf.config import Table
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.policies.base import DEFAULT_SHARE, Begins, Policy, Tables


@dataclasses.dataclass(frozen=True)
class MaskGradients(Policy):
    """Masks the gradients of saturated keys before they are applied or exchanged.

    Attributes:
        share: of the hot examples, whose keys are to be saturated, 0 to 1. None: 0.3, or what
            `Saturation(threshold=)` makes of it.
        decay_moments: whether moments, and velocities, of rows with a masked gradient decay.
    """

    share: float | None = None
    decay_moments: bool = False
    acts_on = "gradients"
    withholds_saturated = True
    probes_every = 10
    steered_by = "share"
    loses_gradients = True
    verb = "masked"
    columns = ("rows", "masked", "masked share")

    def __post_init__(self) -> None:
        if self.share is not None:
            share = require_number("share", self.share, 0.0, 1.0, "MaskGradients", True)
            object.__setattr__(self, "share", share)
        if not isinstance(self.decay_moments, bool):
            raise invalid("decay_moments", self.decay_moments, "MaskGradients", "True or False")

    @property
    def key_share(self) -> float:
        """See `Policy`."""
        return DEFAULT_SHARE if self.share is None else self.share

    @property
    def target_share(self) -> float:
        """See `Policy`."""
        return self.key_share

    @property
    def gives_key_share(self) -> bool:  # type: ignore[override]
        """See `Policy`."""
        return self.share is not None

    def example_rule(self, state: Any, begins: Begins) -> dict[str, Any] | None:
        """Counts the examples that could be skipped, for the estimate of their worth."""
        return {"mode": "drift", "threshold": begins.threshold, "shadow": True}

    def gradient_rule(self, table: Table, tables: Tables) -> UpdatePolicy:
        """See `Policy`."""
        return UpdatePolicy(mode="mask", decay_skipped=self.decay_moments)
