"""A bound in the unit of the rows, and what deferring by it costs: an empirical rule."""

import dataclasses

from slipstream_tf._utils.errors import require_integer, require_number

# AUC lost per learning rate's worth of movement. Measured with Adagrad on globo clicks (rates
# 0.05 and 0.1, movements of 0.05 to 0.2 rates, 4 simulated ranks): 0.002 to 0.006; doubled.
LEAST_AUC_LOSS_PER_RATE = 0.002
AUC_LOSS_PER_RATE = 0.012

# Movement left undone by default, in learning rates: cost no AUC beyond the spread of seeds on
# globo (Adagrad 0.1). A whole rate cost 0.005 on generated examples (Adagrad 0.005).
RATES_TO_DEFER = 0.05
MOVEMENT_OF_UNKNOWN_RATE = 0.005


@dataclasses.dataclass(frozen=True)
class Movement:
    """Until applying what is deferred would move a row: error feedback with a bound.

    Attributes:
        distance: of any value of a row, in the unit of the rows, above 0. None: a twentieth of the
            rows' learning rate; 0.005 where the store does not know it.
        max_age: of a deferred gradient, in steps, at least 1.
    """

    distance: float | None = None
    max_age: int = 200

    def __post_init__(self) -> None:
        if self.distance is not None:
            distance = require_number(
                "distance", self.distance, 0.0, place="Movement", open_minimum=True
            )
            object.__setattr__(self, "distance", distance)
        require_integer("max_age", self.max_age, 1, None, "Movement")

    def of(self, learning_rate: float | None, max_auc_loss: float | None = None) -> float:
        """Returns the distance for rows of a learning rate.

        Args:
            learning_rate: of the rows; None: not known.
            max_auc_loss: maximum AUC that deferring may cost; it sets the distance where the rate
                is known.
        """
        if max_auc_loss is not None and learning_rate:
            return movement_for_auc_loss(max_auc_loss, learning_rate)
        otherwise = MOVEMENT_OF_UNKNOWN_RATE
        return given_or_of_rate(self.distance, RATES_TO_DEFER, learning_rate, otherwise)


def movement_for_auc_loss(max_auc_loss: float, learning_rate: float) -> float:
    """Returns the movement that deferring may leave undone for a maximum AUC loss.

    An empirical rule, not a bound: rows move in units of the learning rate, and what is deferred
    of a row costs in proportion. Rules other than Adagrad were not measured.

    Args:
        max_auc_loss: maximum AUC that deferring may cost, above 0.
        learning_rate: of the rows.

    Returns:
        A distance, in the unit of the rows.
    """
    return learning_rate * max_auc_loss / AUC_LOSS_PER_RATE


def auc_loss_of_movement(movement: float, learning_rate: float) -> tuple[float, float]:
    """Returns the quality that deferring may cost, by the same empirical rule.

    Args:
        movement: that deferring leaves undone, in the unit of the rows.
        learning_rate: of the rows, above 0.

    Returns:
        (least, most) AUC: the least that was measured, and twice the most.
    """
    rates = movement / learning_rate
    return rates * LEAST_AUC_LOSS_PER_RATE, rates * AUC_LOSS_PER_RATE


def given_or_of_rate(
    given: float | None, rates: float, learning_rate: float | None, otherwise: float
) -> float:
    """Returns a setting, or so many learning rates if None; `otherwise` without a rate."""
    if given is not None:
        return given
    return rates * learning_rate if learning_rate else otherwise
