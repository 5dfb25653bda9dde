"""Definitions of deferral, masking and classification in NumPy.

Each rule has one definition here. Tests compare every implementation with it: the ops on a CPU and
on a GPU, the native table, and the stores of variables. This module imports only NumPy and the
standard library, so that programs on a machine without TensorFlow can use it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import numpy as np

# Number of rows in a chunk of the sum of a key's gradients.
ROWS_PER_CHUNK = 256
LOWEST_KEY = np.iinfo(np.int64).min
INFINITY = np.float32(np.inf)
COUNTS = (
    "offered",
    "sent",
    "deferred",
    "due_by_movement",
    "due_by_age",
    "flushed",
    "over_budget",
    "without_gradient",
)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Raises AssertionError unless shapes, dtypes and bits are equal; a NaN equals every NaN."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)
    if found.dtype == np.float32:
        is_number = ~np.isnan(found)
        np.testing.assert_array_equal(np.signbit(found[is_number]), np.signbit(expected[is_number]))


@dataclasses.dataclass(frozen=True)
class DeferralRule:
    """The settings of a step that defers gradients.

    Attributes:
        defers: whether sums may be deferred. If false, sums leave with the next gradient of their
            key or by age.
        by_movement: whether a sum may wait because it is small; otherwise because its key is
            saturated.
        limit: with `by_movement`: a sum may wait while all its absolute values are below the limit.
        saturated: without `by_movement`: the keys whose sums may wait.
        max_age: a sum is due so many steps after the step in which it began.
        max_rows: maximum number of deferred sums. More may be deferred from earlier steps; they
            stay.
        capacity: number of sums that the buffers can hold.
    """

    defers: bool = True
    by_movement: bool = True
    limit: float = 0.0
    saturated: Collection[int] = ()
    max_age: int = 1
    max_rows: int = 0
    capacity: float = math.inf

    def may_wait(self, key: int, total: np.ndarray) -> bool:
        """Returns whether the sum of a key may wait, whatever its age. A NaN may not."""
        if not np.isfinite(total).all():
            return False
        if self.by_movement:
            return bool(np.abs(total).max() < np.float32(self.limit))
        return key in self.saturated


class DeferralDefinition:
    """A sum of gradients for each key that waits, and the step in which the sum began.

    A step adds each gradient to the sum of its key, as `gradient + sum` in float32. Then the first
    matching rule decides about the sum:

    1. A sum of `max_age` steps or more is due.
    2. Every sum is due if nothing may be deferred or the step flushes.
    3. A sum that may not wait is due, and so are sums that are not finite and the sum of
       `lowest_key`.
    4. A sum whose key had one before the step stays.
    5. A new sum stays if there is room, in the order of keys; otherwise it is due.

    A sum without a gradient in the step is due by age, or if the step flushes. It leaves before new
    sums get its room.

    Attributes:
        sums: the deferred sums by key, float32 [dim].
        since: the step in which each sum began, by key.
        steps: number of steps so far.
        flushes: whether all sums are due in the next step.
        counts: gradients and sums so far, by the names in `COUNTS`.
    """

    def __init__(self, dim: int, lowest_key: int | None = LOWEST_KEY):
        """Defers nothing yet.

        Args:
            dim: values per gradient.
            lowest_key: key that marks free places of a buffer, so that its sum never waits. None:
                there is no such key.
        """
        self._dim, self._lowest_key = dim, lowest_key
        self.sums: dict[int, np.ndarray] = {}
        self.since: dict[int, int] = {}
        self.steps, self.flushes = 0, False
        self.counts = dict.fromkeys(COUNTS, 0)

    def step(
        self, rule: DeferralRule, keys: Sequence[int], gradients: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds the gradients of a step to the sums, and removes the sums that are due.

        Args:
            rule: settings of this step.
            keys: int64 [n], ascending, each once.
            gradients: float32 [n, dim].

        Returns:
            Keys int64 [due], ascending, and sums float32 [due, dim].
        """
        self.steps += 1
        self.counts["offered"] += len(keys)
        may_defer = rule.defers and not self.flushes
        due: dict[int, np.ndarray] = {}
        new: dict[int, np.ndarray] = {}
        for key, gradient in zip(map(int, keys), gradients, strict=True):
            is_deferred = key in self.sums
            total = gradient + self.sums.get(key, np.float32(0))
            is_old = is_deferred and self._age(key) >= rule.max_age
            may_wait = rule.may_wait(key, total) and key != self._lowest_key
            if is_old or not may_defer or not may_wait:
                due[key] = total
                self._remove(key)
                self.counts["due_by_age"] += is_old
                self.counts["due_by_movement"] += not is_old and may_defer and rule.by_movement
            elif is_deferred:
                self.sums[key] = total
                self.counts["deferred"] += 1
            else:
                new[key] = total
        for key in [key for key in self.sums if self.flushes or self._age(key) >= rule.max_age]:
            due[key] = self._remove(key)
            self.counts["flushed" if self.flushes else "due_by_age"] += 1
            self.counts["without_gradient"] += 1
        for key, total in new.items():
            if len(self.sums) < min(rule.max_rows, rule.capacity):
                self.sums[key], self.since[key] = total, self.steps
                self.counts["deferred"] += 1
            else:
                due[key] = total
                self.counts["over_budget"] += 1
        self.flushes = False
        return self._sorted(due)

    def flush_with_next_step(self) -> None:
        """Makes all sums due in the next step, in which nothing is deferred."""
        self.flushes = bool(self.sums)

    def flush(self) -> tuple[np.ndarray, np.ndarray]:
        """Removes all sums at once, between two steps; returns them as `step` does."""
        due = {key: self._remove(key) for key in list(self.sums)}
        self.counts["flushed"] += len(due)
        self.counts["without_gradient"] += len(due)
        return self._sorted(due)

    def empty(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns no keys and no sums, as `step` does if nothing is due."""
        return self._sorted({})

    def deferred(self) -> dict[int, tuple[int, bytes]]:
        """Returns the age of each deferred sum, in steps, and its bytes, by key."""
        return {key: (self._age(key), total.tobytes()) for key, total in self.sums.items()}

    def _age(self, key: int) -> int:
        return self.steps - self.since[key]

    def _remove(self, key: int) -> np.ndarray:
        self.since.pop(key, None)
        return self.sums.pop(key, np.empty(0, np.float32))

    def _sorted(self, due: Mapping[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        self.counts["sent"] += len(due)
        order = sorted(due)
        sums = np.array([due[key] for key in order], np.float32).reshape(-1, self._dim)
        return np.array(order, np.int64), sums


@dataclasses.dataclass(frozen=True)
class KeptRows:
    """The result of `sum_and_mask`.

    Attributes:
        keys: [kept], in the dtype of the input.
        rows: float32 [kept, ...].
        masked: number of rows that were masked.
        offered: number of rows before masking; if summed, the number of different keys.
    """

    keys: np.ndarray
    rows: np.ndarray
    masked: int
    offered: int


def sum_in_chunks(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sum of at least one row, in float32.

    The rows of each chunk are added in order, then the sums of the chunks in order.
    """
    starts = range(0, len(rows), ROWS_PER_CHUNK)
    chunks = [functools.reduce(np.add, rows[i : i + ROWS_PER_CHUNK]) for i in starts]
    return functools.reduce(np.add, chunks)


def sum_and_mask(
    keys: np.ndarray, rows: np.ndarray, masked: Collection[int], deduplicate: bool = True
) -> KeptRows:
    """Removes the rows of masked keys, and sums the rows of equal keys on request.

    A sum takes the rows of its key in the order of the input, see `sum_in_chunks`. Native tables
    sum without chunks, which is the same for at most `ROWS_PER_CHUNK` rows. Summed keys ascend.
    Without summing, rows keep their order.

    Args:
        keys: int32 or int64 [n].
        rows: float32 [n, ...].
        masked: the keys to remove.
        deduplicate: whether rows of equal keys are summed first.
    """
    masked = set(masked)
    offered = keys.size
    if deduplicate:
        rows_of: dict[int, list[np.ndarray]] = {}
        for key, row in zip(keys.tolist(), rows, strict=True):
            rows_of.setdefault(key, []).append(row)
        order, offered = sorted(rows_of), len(rows_of)
        keys = np.array(order, keys.dtype)
        sums = [sum_in_chunks(rows_of[key]) for key in order]
        rows = np.array(sums, np.float32).reshape(offered, *rows.shape[1:])
    stays = np.array([key not in masked for key in keys.tolist()], bool)
    return KeptRows(keys[stays], rows[stays], int((~stays).sum()), offered)


def skip_score(
    alpha: Fraction, drifts: Mapping[tuple[int, int], float], lookups: Sequence[tuple[int, int]]
) -> np.float32:
    """Returns the skip score of an example: its `ceil(alpha * m)`-th smallest drift, float32.

    A key without a drift counts as infinite. The score of an example without lookups is infinite.

    Args:
        alpha: exact fraction of the example's lookups, above 0 and at most 1.
        drifts: drift of each tracked key, by (table, key).
        lookups: (table, key) of the example's m lookups, in any order.
    """
    if not lookups:
        return INFINITY
    ordered = sorted(np.float32(drifts.get(lookup, INFINITY)) for lookup in lookups)
    return ordered[math.ceil(alpha * len(lookups)) - 1]


def classify(scores: Sequence[float], threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns which examples can be skipped, bool [batch], and their weights, float32 [batch].

    An example can be skipped if its score is below the threshold. Without thinning its weight is 0,
    which drops it; the weight of every other example is 1.

    Args:
        scores: float32 [batch], as `skip_score` returns them.
        threshold: compared in float32.
    """
    skippable = np.array(scores, np.float32).reshape(-1) < np.float32(threshold)
    return skippable, np.where(skippable, np.float32(0), np.float32(1))
