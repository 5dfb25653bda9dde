"""Statistics of a window's losses, as the input classifier gathers them. Pure NumPy."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class LossStatistics:
    """Losses of the inputs that one window trained, before they were trained on.

    The residual of an input is 1 - exp(-loss): for binary cross-entropy |p - y|.

    Attributes:
        skippable: inputs that could have been skipped but were trained.
        skippable_squared_residuals: sum over these inputs.
        weight: inputs that all trained inputs stand for.
        weighted_total: sum of weight * loss.
        weighted_squared_residuals: sum of weight * squared residual.
        not_finite: inputs left out because their loss was not finite.
        histogram: float64 [2, bins], weights of the inputs by label (0, 1) and predicted
            probability, ascending.
    """

    skippable: int
    skippable_squared_residuals: float
    weight: float
    weighted_total: float
    weighted_squared_residuals: float
    not_finite: int
    histogram: np.ndarray

    @classmethod
    def from_sums(cls, sums: np.ndarray, histogram: np.ndarray) -> "LossStatistics":
        """Returns the statistics with these `sums`, float64 [6], and this histogram."""
        squares, weight, total, residuals = map(float, sums[1:5])
        return cls(int(sums[0]), squares, weight, total, residuals, int(sums[5]), histogram)

    def sums(self) -> np.ndarray:
        """Returns all but the histogram, float64 [6], in the order of the fields."""
        return np.array(dataclasses.astuple(self)[:-1], np.float64)

    @property
    def mean_loss(self) -> float | None:
        """Mean loss over the inputs that the trained ones stand for; None for none."""
        return self.weighted_total / self.weight if self.weight else None

    @property
    def mean_squared_residual(self) -> float | None:
        """Mean squared residual over the same; None for none."""
        return self.weighted_squared_residuals / self.weight if self.weight else None

    @property
    def auc(self) -> float | None:
        """Area under the ROC curve to the histogram's resolution; None without both labels."""
        negatives, positives = self.histogram
        pairs = negatives.sum() * positives.sum()
        if not pairs:
            return None
        below = np.cumsum(negatives) - negatives
        return float((positives * (below + 0.5 * negatives)).sum() / pairs)
