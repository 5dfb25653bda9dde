"""Statistics of a window's losses, as the input classifier gathers them. Pure NumPy."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over inputs.

    Attributes:
        count: inputs.
        total: sum of their losses.
        squares: sum of the squares of the same.
        squared_residuals: sum of (1 - exp(-loss))^2: for binary cross-entropy |p - y| squared.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    squared_residuals: float = 0.0


@dataclasses.dataclass(frozen=True)
class LossStatistics:
    """Losses of the inputs that one window trained, before they were trained on.

    Attributes:
        skippable: inputs that could have been skipped but were trained.
        others: the other inputs.
        not_finite: inputs left out because their loss was not finite.
        histogram: float64 [2, bins], weights of the inputs by label (0, 1) and predicted
            probability, ascending.
        weight: inputs that all of them stand for.
        weighted_total: sum of weight * loss.
        weighted_squared_residuals: sum of weight * squared residual.
    """

    skippable: Moments
    others: Moments
    not_finite: int
    histogram: np.ndarray
    weight: float = 0.0
    weighted_total: float = 0.0
    weighted_squared_residuals: float = 0.0

    @classmethod
    def from_sums(cls, sums: np.ndarray, histogram: np.ndarray) -> "LossStatistics":
        """Returns the statistics of which `sums` are had, float64 [12], and the histogram."""
        skippable, others = (
            Moments(int(part[0]), *map(float, part[1:])) for part in sums[:8].reshape(2, 4)
        )
        weighted = map(float, sums[8:11])
        return cls(skippable, others, int(sums[11]), histogram, *weighted)

    def sums(self) -> np.ndarray:
        """Returns all but the histogram, float64 [12], in the order that the classifier has."""
        moments = (self.skippable, self.others)
        values = [value for part in moments for value in dataclasses.astuple(part)]
        weighted = (self.weight, self.weighted_total, self.weighted_squared_residuals)
        return np.array([*values, *weighted, self.not_finite], np.float64)

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
