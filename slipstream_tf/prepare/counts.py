"""Accesses per key of a field: exact while they fit a bound, else with a stated error. Pure NumPy.

Beyond the bound the rarest keys are dropped (a mergeable summary after Misra and Gries): a count is
then short by at most `count_error`, and the number of keys is estimated from the smallest values
of a hash of theirs (k minimum values, Bar-Yossef et al. 2002).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf.hashing import hash_keys

# What an entry takes: 16 bytes, and as much again while two runs are merged.
BYTES_PER_KEY = 32
_SMALLEST = 1 << 16  # Hashes kept: a relative error of 1 / sqrt of it, 0.4%.


class FieldCounts:
    """Counts of one field's keys.

    Attributes:
        lookups: keys counted, each time that they occur.
        count_error: a key's count is short by at most this; 0 means that all counts are exact.
    """

    def __init__(self) -> None:
        self.lookups = 0
        self.count_error = 0
        # Runs of (ascending keys, their counts), each at least twice as long as the next one.
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        self._dropped = np.empty(0, np.uint64)  # The smallest hashes of dropped keys.

    @property
    def num_entries(self) -> int:
        """Entries held: keys, some of them more than once."""
        return sum(len(keys) for keys, _ in self._runs)

    def add(self, keys: np.ndarray) -> None:
        """Counts keys int64 [n]."""
        if not keys.size:
            return
        self.lookups += int(keys.size)
        counted = pc.value_counts(pa.array(keys))
        distinct = counted.field("values").to_numpy(zero_copy_only=False)
        counts = counted.field("counts").to_numpy(zero_copy_only=False)
        order = np.argsort(distinct)
        self._runs.append((distinct[order], counts[order]))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            self._merge_last()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (keys int64 [n], counts int64 [n]), highest count first, ties by key."""
        self._merge_all()
        keys, counts = self._runs[0] if self._runs else (np.empty(0, np.int64),) * 2
        order = np.argsort(-counts, kind="stable")
        return keys[order], counts[order]

    def cardinality(self) -> int:
        """Returns how many keys there are; an estimate if `count_error` is not 0."""
        self._merge_all()
        if not self._runs:
            return 0
        keys = self._runs[0][0]
        if not self.count_error:
            return len(keys)
        smallest = _smallest(self._dropped, hash_keys(keys))
        if len(smallest) < _SMALLEST:
            return len(smallest)
        return max(len(keys), round((_SMALLEST - 1) * 2.0**64 / float(smallest[-1])))

    def drop_rarest(self) -> None:
        """Drops the rarer half of the keys."""
        keys, counts = self.result()
        kept = len(keys) // 2
        if kept == len(keys):
            return
        self.count_error += int(counts[kept])
        self._dropped = _smallest(self._dropped, hash_keys(keys[kept:]))
        order = np.argsort(keys[:kept])
        self._runs = [(keys[:kept][order], counts[:kept][order])]

    def _merge_all(self) -> None:
        while len(self._runs) > 1:
            self._merge_last()

    def _merge_last(self) -> None:
        (first, first_counts), (second, second_counts) = self._runs[-2:]
        keys = np.concatenate([first, second])
        # Stable, since NumPy's stable sort merges two runs in one pass.
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], np.concatenate([first_counts, second_counts])[order]
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        self._runs[-2:] = [(keys[starts], np.add.reduceat(counts, starts))]


class KeyCounts:
    """Counts of all fields within one bound."""

    def __init__(self, fields: Sequence[str], most_keys: int):
        """Starts at nothing.

        Args:
            fields: their names.
            most_keys: entries held over all fields, at least 2; each takes BYTES_PER_KEY.
        """
        self.fields = {name: FieldCounts() for name in fields}
        self._most_keys = most_keys

    def add(self, field: str, keys: np.ndarray) -> None:
        """Counts keys int64 [n] of a field; drops the rarest ones of the largest fields if need be.

        The result depends on the calls and their order alone.
        """
        self.fields[field].add(keys)
        while sum(counts.num_entries for counts in self.fields.values()) > self._most_keys:
            largest = max(self.fields.values(), key=lambda counts: counts.num_entries)
            largest.drop_rarest()


def _smallest(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The smallest distinct values of both, ascending."""
    if second.size > 2 * _SMALLEST:
        # Distinct as they are: the hash is one to one, and so are keys.
        second = np.partition(second, _SMALLEST)[:_SMALLEST]
    return np.union1d(first, second)[:_SMALLEST]
