"""How the drifts of millions of keys are distributed, without sorting them all.

In: drifts, table by table. Out: how many are not finite and, of the others, quantiles and a
histogram, bit for bit what `np.quantile` and `np.histogram` give.
Method: drifts are counted by the upper half of their bits, which orders them; only those that share
it with a quantile or with a bucket's bound are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
# Bounds of a histogram's buckets: as wide in every window, so that windows can be compared.
_BUCKETS_PER_DECADE = 4
_LEAST_DECADE, _MOST_DECADE = -9, 9
_INFINITY = 0x7F80  # the upper half of its bits; NaN's is that or more


class DriftDistribution:
    """Distribution of a window's drifts.

    Attributes:
        not_finite: number of drifts that are NaN or infinite.
    """

    def __init__(self, drift: Sequence[np.ndarray]):
        """Counts the drifts.

        Args:
            drift: float32 [n] each, n its own; not negative.
        """
        parts = [np.ascontiguousarray(part, np.float32) for part in drift if len(part)]
        halves = [_upper_halves(part) for part in parts]
        counts = np.zeros(1 << 15, np.int64)
        for half in halves:
            counts += np.bincount(half, minlength=counts.size)
        self.not_finite = int(counts[_INFINITY:].sum())
        self._finite = int(counts[:_INFINITY].sum())
        self._bounds, as_float32 = _bucket_bounds()

        # Positions of the neighbours of each quantile among the finite drifts in order.
        last = max(self._finite - 1, 0)
        self._places = last * np.asarray(QUANTILES)
        lower = np.floor(self._places).astype(np.int64)
        positions = np.stack([lower, np.minimum(lower + 1, last)])
        half_at = np.searchsorted(np.cumsum(counts[:_INFINITY]), positions, side="right")
        half_of_bound = _upper_halves(as_float32)

        is_close = np.zeros(counts.size, bool)
        is_close[half_at[half_at < _INFINITY]] = True
        is_close[half_of_bound] = True
        is_close[0] = True
        # Zeros may be most of all drifts; they are known without a look.
        close = [
            part[is_close[half] & (part != 0.0)] for part, half in zip(parts, halves, strict=True)
        ]
        self._close = np.sort(np.concatenate(close)) if close else np.empty(0, np.float32)
        apart = np.where(is_close, 0, counts)
        zeros = counts[0] - np.count_nonzero(_upper_halves(self._close) == 0)
        apart[0] = zeros
        apart_below = np.concatenate([[0], np.cumsum(apart)])

        self._below_bounds = apart_below[half_of_bound] + np.searchsorted(self._close, as_float32)
        among_close = positions - np.maximum(apart_below[half_at], zeros)
        self._neighbours = np.zeros(positions.shape, np.float32)
        if self._finite:
            is_zero = positions < zeros
            self._neighbours[~is_zero] = self._close[among_close[~is_zero]]

    def quantiles(self) -> Mapping[float, float]:
        """Returns quantile -> drift for `QUANTILES`; empty without a finite drift."""
        if not self._finite:
            return MappingProxyType({})
        lower, upper = self._neighbours
        weight = self._places - np.floor(self._places)
        step = upper - lower  # float32, as in NumPy
        values = np.where(weight < 0.5, lower + step * weight, upper - step * (1.0 - weight))
        return MappingProxyType(dict(zip(QUANTILES, map(float, values), strict=True)))

    def histogram(self) -> tuple[tuple[float, float, int], ...]:
        """Counts the finite drifts in buckets of a quarter of a decade.

        Returns:
            (lower bound, upper bound, count) of each bucket that is not empty. The lowest is from 0
            to 1e-9, and what is above the highest, 1e9, is counted in it.
        """
        below = self._below_bounds.copy()
        below[-1] = self._finite
        counts = np.diff(below)
        return tuple(
            (float(self._bounds[i]), float(self._bounds[i + 1]), int(counts[i]))
            for i in np.flatnonzero(counts)
        )


def _upper_halves(numbers: np.ndarray) -> np.ndarray:
    """The upper half of float32 numbers' bits without their sign: uint16 [n], 0 to 0x7FFF."""
    return ((numbers.view(np.uint32) >> np.uint32(16)) & np.uint32(0x7FFF)).astype(np.uint16)


def _bucket_bounds() -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the buckets, float64 [b], and of each the least float32 that is not below it."""
    steps = np.arange(_LEAST_DECADE * _BUCKETS_PER_DECADE, _MOST_DECADE * _BUCKETS_PER_DECADE + 1)
    bounds = np.concatenate([[0.0], 10.0 ** (steps / _BUCKETS_PER_DECADE)])
    nearest = bounds.astype(np.float32)
    next_one = np.nextafter(nearest, np.float32(np.inf))
    return bounds, np.where(nearest.astype(np.float64) < bounds, next_one, nearest)
