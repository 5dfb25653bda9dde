"""Statistics of the losses in a window, in NumPy."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class LossStatistics:
    """Statistics of the losses of a window's trained examples.

    Each loss is measured before training on the example. The residual is 1 - exp(-loss),
    which for binary cross-entropy is |p - y|.

    Attributes:
        skippable: Number of skippable examples that were trained.
        skippable_squared_residuals: Sum of the squared residuals of these examples.
        weight: Sum of the weights: the number of examples that all trained examples represent.
        weighted_total: Sum of weight * loss.
        weighted_squared_residuals: Sum of weight * squared residual.
        not_finite: Number of examples that were ignored because their loss was not finite.
        histogram: float64 [2, bins], weights of the examples by label (0, 1) and predicted
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
        """Returns statistics from the result of `sums`, float64 [6], and a histogram."""
        squares, weight, total, residuals = map(float, sums[1:5])
        return cls(int(sums[0]), squares, weight, total, residuals, int(sums[5]), histogram)

    def sums(self) -> np.ndarray:
        """Returns all fields except the histogram, float64 [6], in order."""
        names = [field.name for field in dataclasses.fields(self)[:-1]]
        return np.array([getattr(self, name) for name in names], np.float64)

    @property
    def mean_loss(self) -> float | None:
        """Weighted mean loss, or None without examples."""
        return self.weighted_total / self.weight if self.weight else None

    @property
    def mean_squared_residual(self) -> float | None:
        """Weighted mean squared residual, or None without examples."""
        return self.weighted_squared_residuals / self.weight if self.weight else None

    @property
    def auc(self) -> float | None:
        """Area under the ROC curve; None if only one label occurs.

        The histogram bins limit the resolution.
        """
        negatives, positives = self.histogram
        pairs = negatives.sum() * positives.sum()
        if not pairs:
            return None
        below = np.cumsum(negatives) - negatives
        return float((positives * (below + 0.5 * negatives)).sum() / pairs)
