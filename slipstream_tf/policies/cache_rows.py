"""Ranks read settled rows from replicas of their own, where tables are sharded."""

import dataclasses

from slipstream_tf.errors import require_number
from slipstream_tf.policies.base import Policy
from slipstream_tf.policies.movement import given_or_of_rate

# Drift over a window up to which replicas of a row may be read by default, in learning rates.
_RATES = 0.25
_DRIFT_OF_UNKNOWN_RATE = 0.025


@dataclasses.dataclass(frozen=True)
class CacheRows(Policy):
    """Reads rows that have settled from replicas instead of requesting them in every step.

    The replicas are read-only, and renewed at window ends.

    Attributes:
        max_drift: drift of a saturated row over the last window, below which its replicas may be
            read, above 0; in the unit of the drift metric. None: a quarter of the rows' learning
            rate; 0.025 where the store does not know it.
    """

    max_drift: float | None = None
    acts_on = "replicas"
    columns = ("replicas",)

    def __post_init__(self) -> None:
        if self.max_drift is not None:
            place, name = "CacheRows", "max_drift"
            number = require_number(name, self.max_drift, 0.0, place=place, open_minimum=True)
            object.__setattr__(self, name, number)

    def read_only_drift(self, learning_rate: float | None) -> float:
        """See `Policy`."""
        return given_or_of_rate(self.max_drift, _RATES, learning_rate, _DRIFT_OF_UNKNOWN_RATE)
