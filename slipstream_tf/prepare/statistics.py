"""What prepared data is like: keys per field, their skew, and how many inputs are hot.

In: shards and counts of the training part. Out: `statistics.json`, `counts.parquet`. An input is
hot when each of its keys is in the hot set: those are what Slipstream (arXiv 2404.04270) can skip.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipstream_tf import disk
from slipstream_tf.inputs.spec import MISSING_KEY
from slipstream_tf.prepare.counts import FieldCounts
from slipstream_tf.saturation.hot_set import Candidates, choose_hot_keys, most_candidates
from slipstream_tf.telemetry.run_record import write_json

STATISTICS = "statistics.json"
COUNTS = "counts.parquet"
TOP_SHARE = 0.01
HOT_INPUTS = ".hot_inputs.json"  # While they are counted.
_GROUP_ROWS = 1 << 20
_COUNTS_SCHEMA = pa.schema([("field", pa.string()), ("key", pa.int64()), ("count", pa.int64())])


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
        places = np.minimum(np.searchsorted(hot_keys, distinct), max(0, len(hot_keys) - 1))
        if hot_keys.size:
            is_distinct_hot = hot_keys[places] == distinct
        else:
            is_distinct_hot = np.zeros(len(distinct), bool)
        is_key_hot = is_distinct_hot[encoded.indices.to_numpy(zero_copy_only=False)]
        if lengths is not None:
            cold, ends = np.concatenate([[0], np.cumsum(~is_key_hot)]), np.cumsum(lengths)
            is_key_hot = cold[ends] == cold[ends - lengths]
        is_hot &= is_key_hot
    return is_hot


class HotInputs:
    """Counts hot inputs shard by shard; what is counted survives an interruption."""

    def __init__(self, folder: str, hot: Mapping[str, np.ndarray]):
        """Reads what an interrupted count of the same hot set left.

        Args:
            folder: of the prepared data.
            hot: ascending hot keys int64 by field.
        """
        digest = hashlib.sha256()
        for field, keys in hot.items():
            digest.update(f"{field}\n{len(keys)}\n".encode())
            digest.update(keys.tobytes())
        self._digest, self._hot = digest.hexdigest(), hot
        self._path = Path(folder, HOT_INPUTS)
        self._by_shard: dict[str, int] = {}
        # Where there is none, or none that can be used, all shards are counted.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self._path.read_text(encoding="utf-8"))
            if state["hot_set"] == self._digest:
                self._by_shard = state["inputs"]

    def count(self, name: str, tables: Callable[[], Iterator[pa.Table]]) -> int:
        """Returns the hot inputs of a shard; several threads may count at the same time.

        Args:
            name: of the shard.
            tables: gives its inputs.
        """
        if name in self._by_shard:
            return self._by_shard[name]
        return sum(int(hot_rows(table, self._hot).sum()) for table in tables())

    def keep(self, name: str, inputs: int) -> None:
        """Writes down what was counted of a shard."""
        if name not in self._by_shard:
            self._by_shard[name] = inputs
            write_json(str(self._path), {"hot_set": self._digest, "inputs": self._by_shard})

    def finish(self) -> None:
        """Forgets what was kept."""
        self._path.unlink(missing_ok=True)


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
                columns = [pa.array([field] * len(keys[rows])), pa.array(keys[rows])]
                writer.write_table(
                    pa.table([*columns, pa.array(counts[rows])], schema=_COUNTS_SCHEMA)
                )


def read_statistics(folder: str) -> dict[str, Any]:
    """Returns the content of statistics.json; nothing if it is not there or damaged."""
    try:
        statistics = json.loads(Path(folder, STATISTICS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return statistics if isinstance(statistics, dict) else {}
