"""Ranks read hot rows from replicas of their own, where tables are sharded."""

import dataclasses

from slipstream_tf.errors import invalid, require_number
from slipstream_tf.policies.base import Policy
from slipstream_tf.policies.movement import given_or_of_rate

# Drift over a window up to which replicas of a row may be read by default, in learning rates.
_RATES = 0.25
_DRIFT_OF_UNKNOWN_RATE = 0.025


@dataclasses.dataclass(frozen=True)
class ReadOnly:
    """Replicas of rows that have settled, renewed at window ends.

    Attributes:
        max_drift: drift of a saturated row over the last window, below which its replicas may be
            read, above 0; in the unit of the drift metric. None: a quarter of the rows' learning
            rate; 0.025 where the store does not know it.
    """

    max_drift: float | None = None

    def __post_init__(self) -> None:
        if self.max_drift is not None:
            place, name = "ReadOnly", "max_drift"
            number = require_number(name, self.max_drift, 0.0, place=place, open_minimum=True)
            object.__setattr__(self, name, number)

    def drift_of(self, learning_rate: float | None) -> float:
        """Returns the bound for rows of a learning rate; None: not known."""
        return given_or_of_rate(self.max_drift, _RATES, learning_rate, _DRIFT_OF_UNKNOWN_RATE)


@dataclasses.dataclass(frozen=True)
class Refreshed:
    """Replicas of hot rows, each sent anew when its row has moved further than a distance.

    Attributes:
        movement: of any value of a row, in the unit of the rows, at least 0; with 0 results stay
            the same.
    """

    movement: float

    def __post_init__(self) -> None:
        number = require_number("movement", self.movement, 0.0, place="Refreshed")
        object.__setattr__(self, "movement", number)


@dataclasses.dataclass(frozen=True)
class CacheRows(Policy):
    """Reads hot rows from replicas instead of requesting them of their owners in every step.

    Attributes:
        replicas: `ReadOnly(...)` or `Refreshed(...)`.
    """

    replicas: ReadOnly | Refreshed = dataclasses.field(default_factory=ReadOnly)
    acts_on = "replicas"
    columns = ("replicas",)

    def __post_init__(self) -> None:
        if not isinstance(self.replicas, (ReadOnly, Refreshed)):
            allowed = "slipstream_tf.ReadOnly(...) or slipstream_tf.Refreshed(movement)"
            raise invalid("replicas", self.replicas, "CacheRows", allowed)

    @property
    def refresh_movement(self) -> float | None:
        """See `Policy`."""
        return self.replicas.movement if isinstance(self.replicas, Refreshed) else None

    def read_only_drift(self, learning_rate: float | None) -> float:
        """See `Policy`."""
        return (
            0.0 if isinstance(self.replicas, Refreshed) else self.replicas.drift_of(learning_rate)
        )
