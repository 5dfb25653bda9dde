"""What prepared data is like: keys per field, their skew, and how many inputs are hot.

In: keys and shards of the training part. Out: `statistics.json`, `counts.parquet`. An input is hot
when each of its keys is in the hot set: those are what Slipstream (arXiv 2404.04270) can skip.

Accesses per key are exact while they fit a bound. Beyond it the rarest keys are dropped (a
mergeable summary after Misra and Gries): a count is then short by at most `count_error`, and the
number of keys is estimated from the smallest values of a hash of theirs (k minimum values,
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
from slipstream_tf.data.spec import MISSING_KEY
from slipstream_tf.engine.hot_set import Candidates, choose_hot_keys, most_candidates

STATISTICS = "statistics.json"
COUNTS = "counts.parquet"
TOP_SHARE = 0.01
# What an entry takes: 16 bytes, and as much again while two runs are merged.
BYTES_PER_KEY = 32
_SMALLEST = 1 << 16  # Hashes kept: a relative error of 1 / sqrt of it, 0.4%.
_GROUP_ROWS = 1 << 20
_COUNTS_SCHEMA = pa.schema([("field", pa.string()), ("key", pa.int64()), ("count", pa.int64())])


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
        """Entries kept: keys, some of them more than once."""
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
            most_keys: entries kept over all fields, at least 2; each takes BYTES_PER_KEY.
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


def field_keys(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns a field's keys int64 [total], and int64 [n] lengths if it is one of lists."""
    if not pa.types.is_list(column.type):
        return column.to_numpy(), None
    lengths = pc.list_value_length(column).cast(pa.int64()).to_numpy()
    return pc.list_flatten(column).to_numpy(), lengths


def describe_field(counts: FieldCounts, keys: np.ndarray, key_counts: np.ndarray) -> dict[str, Any]:
    """Describes a field.

    Args:
        counts: of its keys.
        keys: int64 [n], highest count first.
        key_counts: int64 [n].

    Returns:
        lookups: keys counted, each time that they occur.
        keys: how many there are (cardinality).
        is_exact: False: `keys` is an estimate, and counts are short by at most `count_error`.
        top_share: share of the lookups that go to the top 1% of the keys, at least one; at least
            so many if not exact; None without lookups.
        missing_share: share of the lookups without a value; None without lookups.
    """
    cardinality = counts.cardinality()
    top = key_counts[: math.ceil(cardinality * TOP_SHARE)].sum()
    missing = key_counts[keys == MISSING_KEY].sum()
    return {
        "lookups": counts.lookups,
        "keys": cardinality,
        "is_exact": counts.count_error == 0,
        "count_error": counts.count_error,
        "top_share": int(top) / counts.lookups if counts.lookups else None,
        "missing_share": int(missing) / counts.lookups if counts.lookups else None,
    }


def choose_hot(
    counted: Sequence[tuple[np.ndarray, np.ndarray]], dim: int, budget_bytes: int
) -> tuple[list[np.ndarray], int]:
    """Chooses the hot set as training does, from the accesses of the whole training part.

    Args:
        counted: per field keys int64 [n] and their counts, highest count first, ties by key.
        dim: values per row.
        budget_bytes: bytes of all snapshots.

    Returns:
        (int64 [hot keys] per field, ascending; lookups that go to them).
    """
    most = most_candidates(dim, budget_bytes)
    candidates = [Candidates(keys[:most], counts[:most], dim) for keys, counts in counted]
    hot = choose_hot_keys(candidates, budget_bytes)
    lookups = sum(
        int(table.counts[np.isin(table.keys, hot_keys)].sum())
        for table, hot_keys in zip(candidates, hot, strict=True)
    )
    return hot, lookups


def hot_rows(table: pa.Table, hot: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tells which rows of a table have hot keys alone, bool [n].

    Args:
        table: with a column per field.
        hot: ascending hot keys int64 by field. A row without any key is hot.
    """
    is_hot = np.ones(len(table), bool)
    for field, hot_keys in hot.items():
        keys, lengths = field_keys(table[field])
        # Each distinct key is looked for once: the hot set may not fit the processor's cache.
        encoded = pa.array(keys).dictionary_encode()
        distinct = encoded.dictionary.to_numpy(zero_copy_only=False)
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
    """Writes counts.parquet: field, key, count; by field, highest count first, ties by key.

    Args:
        folder: for the file.
        fields: names of the fields.
        counted: per field keys int64 [n] and their counts int64 [n].
    """
    with (
        disk.whole_file(Path(folder, COUNTS)) as partial,
        pq.ParquetWriter(partial, _COUNTS_SCHEMA, use_dictionary=["field"]) as writer,
    ):
        for field, (keys, counts) in zip(fields, counted, strict=True):
            for begin in range(0, len(keys), _GROUP_ROWS):
                rows = slice(begin, begin + _GROUP_ROWS)
                columns = [[field] * len(keys[rows]), keys[rows], counts[rows]]
                writer.write_table(pa.table(list(map(pa.array, columns)), schema=_COUNTS_SCHEMA))


def read_statistics(folder: str) -> dict[str, Any]:
    """Returns the content of statistics.json; nothing if it is not there or damaged."""
    try:
        statistics = json.loads(Path(folder, STATISTICS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return statistics if isinstance(statistics, dict) else {}
