"""Computes statistics of prepared data: keys, skew and hot examples.

Reads the shards of the training part and writes `statistics.json` and `counts.parquet`. An example
is hot if all its keys are in the hot set. Slipstream (arXiv 2404.04270) can skip hot examples.

Counts per key are exact while they fit into a memory bound. Beyond it, the rarest keys are dropped
(a mergeable summary after Misra and Gries). A count is then too low by at most `count_error`, and
the number of keys is estimated from the smallest hash values of the keys (k minimum values,
Bar-Yossef et al. 2002).
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipstream_tf._utils import disk
from slipstream_tf._utils.hashing import hash_keys
from slipstream_tf.data.readers.parquet import list_ids, to_keys
from slipstream_tf.data.spec import MISSING_KEY
from slipstream_tf.engine.hot_set import Candidates, choose_hot_keys, max_candidates

STATISTICS = "statistics.json"
COUNTS = "counts.parquet"
TOP_SHARE = 0.01
# Memory per key with its count: 16 bytes, and the same amount again while two runs are merged.
BYTES_PER_KEY = 32
_SMALLEST = 1 << 16  # Number of hashes kept: the relative error is 1 / sqrt(65536) = 0.4%.
_GROUP_ROWS = 1 << 20
_COUNTS_SCHEMA = pa.schema([("field", pa.string()), ("key", pa.int64()), ("count", pa.int64())])


class FieldCounts:
    """Counts the lookups of each key of one field.

    Attributes:
        lookups: Total number of counted lookups.
        bags: Number of counted bags, 0 for a field with one key per example.
        empty_bags: Number of bags without keys.
        count_error: Maximum amount by which a key's count may be too low. Counts are never too
            high. 0 means that all counts are exact.
    """

    def __init__(self) -> None:
        self.lookups = self.bags = self.empty_bags = 0
        self.count_error = 0
        # Runs of (ascending keys, their counts), each at least twice the length of the next run.
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        self._dropped = np.empty(0, np.uint64)  # The smallest hashes of the dropped keys.

    @property
    def num_entries(self) -> int:
        """Returns the number of stored (key, count) pairs.

        A key may have multiple pairs until runs are merged.
        """
        return sum(len(keys) for keys, _ in self._runs)

    def add(self, ids: pa.Array) -> None:
        """Counts the keys of ids, int64 [n], with null for missing values."""
        if not len(ids):
            return
        self.lookups += len(ids)
        counted = pc.value_counts(ids)
        keys = to_keys(counted.field("values"))
        counts = counted.field("counts").to_numpy(zero_copy_only=False)
        self._runs.append(_summed(keys, counts, np.argsort(keys)))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            self._merge_last()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys int64 [n] and counts int64 [n].

        They are sorted by descending count, then by ascending key.
        """
        self._merge_all()
        keys, counts = self._runs[0] if self._runs else (np.empty(0, np.int64),) * 2
        order = np.argsort(-counts, kind="stable")
        return keys[order], counts[order]

    def cardinality(self) -> int:
        """Returns the number of distinct keys.

        It is an estimate if `count_error` is not 0.
        """
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
        # NumPy's stable sort merges two sorted runs in one pass.
        order = np.argsort(keys, kind="stable")
        counts = np.concatenate([first_counts, second_counts])
        self._runs[-2:] = [_summed(keys, counts, order)]


class KeyCounts:
    """Counts the keys of all fields within a common memory bound."""

    def __init__(self, fields: Sequence[str], max_keys: int):
        """Creates empty counts.

        Args:
            fields: Names of the fields.
            max_keys: Maximum number of entries over all fields, at least 2. Each entry takes
                `BYTES_PER_KEY` bytes.
        """
        self.fields = {name: FieldCounts() for name in fields}
        self._max_keys = max_keys

    def add(self, field: str, ids: pa.Array, lengths: np.ndarray | None = None) -> None:
        """Counts the keys of a field; see `FieldCounts.add`.

        To stay within the bound, the rarest keys of the field with the most entries are dropped.
        The result depends only on the calls and their order.

        Args:
            field: Name of the field.
            ids: int64 [n].
            lengths: int64 [bags], number of keys of each bag. None if the field has no bags.
        """
        counts = self.fields[field]
        counts.add(ids)
        if lengths is not None:
            counts.bags += lengths.size
            counts.empty_bags += int((lengths == 0).sum())
        while sum(counts.num_entries for counts in self.fields.values()) > self._max_keys:
            largest = max(self.fields.values(), key=lambda counts: counts.num_entries)
            largest.drop_rarest()


def _summed(
    keys: np.ndarray, counts: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ascending distinct keys and their counts. `order` sorts the keys."""
    keys, counts = keys[order], counts[order]
    is_first = np.concatenate([[True], keys[1:] != keys[:-1]])
    if is_first.all():
        return keys, counts
    starts = np.flatnonzero(is_first)
    return keys[starts], np.add.reduceat(counts, starts)


def _smallest(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the smallest distinct values of both arrays, ascending."""
    if second.size > 2 * _SMALLEST:
        # No duplicates are possible: the keys are distinct, and the hash is a bijection.
        second = np.partition(second, _SMALLEST)[:_SMALLEST]
    return np.union1d(first, second)[:_SMALLEST]


def field_ids(column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray | None]:
    """Returns the ids of a column, int64 [total], with null for missing values.

    For a column of lists, the second result is their lengths in batches, int64 [n], else None.
    """
    if not pa.types.is_list(column.type):
        return column.combine_chunks(), None
    ids, splits = list_ids(column)
    return ids, np.diff(splits)


def describe_field(counts: FieldCounts, keys: np.ndarray, key_counts: np.ndarray) -> dict[str, Any]:
    """Computes the statistics of a field.

    Args:
        counts: Counts of the field.
        keys: int64 [n], by descending count.
        key_counts: int64 [n].

    Returns:
        A dictionary with these entries:

        - lookups: Total number of lookups, including lookups of `MISSING_KEY`.
        - keys: Number of distinct keys (cardinality), without `MISSING_KEY`.
        - is_exact: False if `keys` is an estimate and counts may be too low.
        - count_error: Maximum amount by which a count may be too low. Counts are never too high.
        - top_share: Fraction of the lookups that go to the most accessed 1% of the keys (at least
          one key). A lower bound if the counts are not exact. None without lookups.
        - missing_share: Fraction of the examples with a missing value. None for bags, which contain
          no missing values, and without examples.
        - empty_share: Fraction of the examples with an empty bag. None if the field has no bags.
    """
    is_missing = keys == MISSING_KEY
    cardinality = counts.cardinality() - int(is_missing.sum())
    top = key_counts[~is_missing][: math.ceil(cardinality * TOP_SHARE)].sum()
    missing = key_counts[is_missing].sum()
    has_missing = counts.lookups and not counts.bags
    return {
        "lookups": counts.lookups,
        "keys": cardinality,
        "is_exact": counts.count_error == 0,
        "count_error": counts.count_error,
        "top_share": int(top) / counts.lookups if counts.lookups else None,
        "missing_share": int(missing) / counts.lookups if has_missing else None,
        "empty_share": counts.empty_bags / counts.bags if counts.bags else None,
    }


def by_table(
    tables: Mapping[str, str], counted: Sequence[tuple[np.ndarray, np.ndarray]]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums the counts of fields that share a table.

    Args:
        tables: Table of each field.
        counted: For each field, int64 [n] keys and their counts, by descending count, ties by key.

    Returns:
        The same for each table.
    """
    result: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for table, (keys, counts) in zip(tables.values(), counted, strict=True):
        if table in result:
            other_keys, other_counts = result[table]
            keys, index = np.unique(np.concatenate([other_keys, keys]), return_inverse=True)
            summed = np.bincount(index, np.concatenate([other_counts, counts]))
            counts = summed.astype(np.int64)
            order = np.argsort(-counts, kind="stable")
            keys, counts = keys[order], counts[order]
        result[table] = (keys, counts)
    return result


def choose_hot(
    counted: Sequence[tuple[np.ndarray, np.ndarray]], dim: int, budget_bytes: int
) -> tuple[list[np.ndarray], int]:
    """Chooses the hot set with the same method as training.

    It uses the counts of the whole training part.

    Args:
        counted: For each table, int64 [n] keys and their counts, by descending count, ties by key.
        dim: Embedding dimension.
        budget_bytes: Maximum bytes of all snapshots.

    Returns:
        (ascending int64 hot keys of each table, number of lookups of hot keys).
    """
    maximum = max_candidates(dim, budget_bytes)
    candidates = [Candidates(keys[:maximum], counts[:maximum], dim) for keys, counts in counted]
    hot = choose_hot_keys(candidates, budget_bytes)
    lookups = sum(
        int(table.counts[np.isin(table.keys, hot_keys)].sum())
        for table, hot_keys in zip(candidates, hot, strict=True)
    )
    return hot, lookups


def hot_rows(table: pa.Table, hot: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns a bool [n] mask of the rows with only hot keys.

    Args:
        table: Table with one column per field.
        hot: Ascending int64 hot keys by field. A row without keys is hot.
    """
    is_hot = np.ones(len(table), bool)
    for field, hot_keys in hot.items():
        ids, lengths = field_ids(table[field])
        # Search each distinct key once, because the hot set may not fit the processor's cache.
        encoded = ids.dictionary_encode(null_encoding="encode")
        distinct = to_keys(encoded.dictionary)
        index = np.minimum(np.searchsorted(hot_keys, distinct), max(0, len(hot_keys) - 1))
        if hot_keys.size:
            is_distinct_hot = hot_keys[index] == distinct
        else:
            is_distinct_hot = np.zeros(len(distinct), bool)
        is_key_hot = is_distinct_hot[encoded.indices.to_numpy(zero_copy_only=False)]
        if lengths is not None:
            cold, ends = np.concatenate([[0], np.cumsum(~is_key_hot)]), np.cumsum(lengths)
            is_key_hot = cold[ends] == cold[ends - lengths]
        is_hot &= is_key_hot
    return is_hot


def write_counts(
    folder: str, fields: Sequence[str], counted: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Writes counts.parquet with the columns field, key and count.

    Rows are ordered by field, then by descending count, ties by key. `MISSING_KEY` becomes null.

    Args:
        folder: Folder for the file.
        fields: Names of the fields.
        counted: For each field, int64 [n] keys and int64 [n] counts.
    """
    with (
        disk.whole_file(Path(folder, COUNTS)) as partial,
        pq.ParquetWriter(partial, _COUNTS_SCHEMA, use_dictionary=["field"]) as writer,
    ):
        for field, (keys, counts) in zip(fields, counted, strict=True):
            for begin in range(0, len(keys), _GROUP_ROWS):
                rows = slice(begin, begin + _GROUP_ROWS)
                shown = pa.array(keys[rows], mask=keys[rows] == MISSING_KEY)
                columns = [pa.array([field] * len(shown)), shown, pa.array(counts[rows])]
                writer.write_table(pa.table(columns, schema=_COUNTS_SCHEMA))


def read_statistics(folder: str) -> dict[str, Any]:
    """Returns the content of statistics.json.

    Returns an empty dictionary if the file is missing or damaged.
    """
    try:
        statistics = json.loads(Path(folder, STATISTICS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return statistics if isinstance(statistics, dict) else {}
