"""Statistics of the dense columns over the training part.

Each shard's statistics are in its manifest entry. They are merged in the order of the shards, so
that a preparation that was interrupted gives the same bits. They describe the numbers before these
are rounded to float32, because whole numbers above 2**24 and large prices lose digits.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MIN_COUNT = 100
_MIN_DISTINCT = 0.95
_YEAR_1990, _YEAR_2100 = 631_152_000, 4_102_444_800
# Standard deviation divided by mean: 0.08 for times that are uniform from 2010 to 2024.
_MAX_TIME_VARIATION = 0.25


@dataclasses.dataclass(frozen=True)
class DenseStatistics:
    """Describes the numbers of a column.

    Attributes:
        count: Number of numbers, without missing ones.
        missing: Number of missing numbers.
        mean, std, min, max: Mean, standard deviation (divided by `count`), minimum and maximum of
            the numbers. None if `count` is 0.
        is_like_ids: Whether the numbers are whole and almost all distinct, in the first row group.
            False if it has fewer than 100 numbers.
    """

    count: int = 0
    missing: int = 0
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    is_like_ids: bool = False

    @classmethod
    def of(cls, values: np.ndarray, is_first: bool = True) -> "DenseStatistics":
        """Computes the statistics of values.

        Args:
            values: float64 or float32 [n]. NaN is a missing number.
            is_first: Whether to determine `is_like_ids`.
        """
        is_missing = np.isnan(values)
        missing = int(np.count_nonzero(is_missing))
        numbers = values[~is_missing] if missing else values
        if not len(numbers):
            return cls(missing=missing)
        count, low, high = len(numbers), numbers.min(), numbers.max()
        is_like_ids = is_first and _are_like_ids(numbers)
        numbers = numbers.astype(np.float64, copy=False)
        mean = numbers.sum() / count
        deviations = numbers - mean
        std = math.sqrt(np.square(deviations, out=deviations).sum() / count)
        return cls(count, missing, float(mean), std, float(low), float(high), is_like_ids)

    def merged(self, other: "DenseStatistics") -> "DenseStatistics":
        """Returns the statistics of the values of both (Chan et al. 1979)."""
        missing = self.missing + other.missing
        if not (self.count and other.count):
            some = self if self.count else other
            return dataclasses.replace(some, missing=missing)
        assert self.mean is not None and self.std is not None
        assert other.mean is not None and other.std is not None
        count = self.count + other.count
        fraction = other.count / count
        change = other.mean - self.mean
        variance = (1 - fraction) * self.std**2 + fraction * other.std**2
        variance += fraction * (1 - fraction) * change**2
        # The first part with enough numbers decides.
        first = self if self.count >= _MIN_COUNT else other
        return DenseStatistics(
            count,
            missing,
            self.mean + fraction * change,
            math.sqrt(variance),
            min(self.min, other.min),  # type: ignore[type-var]
            max(self.max, other.max),  # type: ignore[type-var]
            first.is_like_ids,
        )


def _are_like_ids(numbers: np.ndarray) -> bool:
    if len(numbers) < _MIN_COUNT:
        return False
    # Most columns of fractions are recognized by a few numbers.
    for part in (numbers[:_MIN_COUNT], numbers):
        if not (part == np.rint(part)).all():
            return False
    return pc.count_distinct(pa.array(numbers)).as_py() >= _MIN_DISTINCT * len(numbers)


def suspected_kind(found: DenseStatistics) -> str | None:
    """Returns "timestamp" or "id" if a column probably contains no quantity, else None.

    Numbers are timestamps if all are seconds, milliseconds or microseconds since 1970 of the years
    1990 to 2099, with little variation. They are ids if all are whole and almost all are distinct.

    Args:
        found: Statistics of the column.
    """
    if found.count < _MIN_COUNT:
        return None
    assert found.min is not None and found.max is not None
    assert found.mean is not None and found.std is not None
    for unit in (1, 1e3, 1e6):
        is_in_range = _YEAR_1990 * unit <= found.min and found.max < _YEAR_2100 * unit
        if is_in_range and found.std < _MAX_TIME_VARIATION * found.mean:
            return "timestamp"
    return "id" if found.is_like_ids else None


def merged_statistics(
    shards: Iterable[Mapping[str, Any]], columns: Iterable[str]
) -> dict[str, DenseStatistics]:
    """Returns the statistics of the dense columns over all shards, by name.

    Args:
        shards: Manifest entries of the shards.
        columns: Names of the dense columns.
    """
    result = {name: DenseStatistics() for name in columns}
    for shard in shards:
        for name, found in result.items():
            result[name] = found.merged(DenseStatistics(**shard["dense"][name]))
    return result
