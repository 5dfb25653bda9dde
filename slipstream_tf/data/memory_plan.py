"""Plans which rows of which tables are kept in memory.

The plan uses `statistics.json` and `counts.parquet` of `slipstream-prepare` and a memory limit. It
contains a `Storage` for each table, and the fraction of lookups that find their rows in memory.
The storage sets the row type, a pair (row dtype, slot dtype), and whether the table spills. A table
that spills keeps only some rows in memory and stores the others on disk.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from slipstream_tf._utils.errors import invalid
from slipstream_tf.config import Storage, parse_bytes
from slipstream_tf.data.readers.parquet import to_keys
from slipstream_tf.data.readers.prepared import read_manifest, tables_of
from slipstream_tf.data.statistics import COUNTS, STATISTICS, by_table, read_statistics
from slipstream_tf.tables.sok import hkv

# Bytes per key in the index: entries of 16 bytes at a load of 64% to 80%.
INDEX_BYTES = 24
# Additional bytes per row in memory if its table spills: key, position on disk and time of use.
FRAME_BYTES = 16
# Maximum additional memory of a spilling table, as fractions of `Storage.memory`: pages that are
# read ahead, and blocks that are written. Blocks also have an absolute maximum per table.
PAGES_SHARE, BLOCKS_SHARE, MAX_BLOCKS_BYTES = 0.125, 0.25, 64 << 20
# Capacity of a HierarchicalKV (HKV) table, a GPU hash table of NVIDIA's Sparse Operation Kit (SOK),
# in rows per key.
HKV_ROOM = 1.6
_GIB = 1 << 30
# Row types (row dtype, slot dtype), from the widest to the narrowest.
_ROW_TYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


@dataclasses.dataclass(frozen=True)
class FieldUse:
    """Describes how often the keys of a table are used by its fields.

    Attributes:
        name: Name of the table. It is the name of the field unless fields share the table.
        rows: Number of rows: distinct keys, and a row for missing values if there are any. Fields
            with estimated numbers are assumed to have different keys.
        lookups: Number of lookups of all keys in the training part.
        counts: int64 [n], lookups of the most used keys, in descending order. It may not cover all
            keys.
    """

    name: str
    rows: int
    lookups: int
    counts: np.ndarray

    def served(self, rows: int) -> float:
        """Returns the fraction of lookups for the `rows` most used keys."""
        if self.lookups == 0 or rows >= self.rows:
            return 1.0
        known = int(self.counts[:rows].sum())
        # Assume a uniform distribution of lookups over the keys without a count.
        others = max(0, rows - self.counts.size)
        left = max(0, self.lookups - int(self.counts.sum()))
        more = left * others / max(1, self.rows - self.counts.size)
        return min(1.0, (known + more) / self.lookups)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """Describes the storage of a table.

    Attributes:
        field: Use of the table's keys.
        storage: Setting of the table.
        row_bytes: Bytes of a row and its slots.
        rows_in_memory: Number of rows in memory, at most `field.rows`.
        served: Fraction of the lookups that find their row in memory.
    """

    field: FieldUse
    storage: Storage
    row_bytes: int
    rows_in_memory: int
    served: float

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes of memory, including the index."""
        nbytes = self.rows_in_memory * self.row_bytes + self.field.rows * INDEX_BYTES
        if self.storage.spill is not None:
            of_rows = self.rows_in_memory * self.row_bytes
            blocks = min(BLOCKS_SHARE * of_rows, MAX_BLOCKS_BYTES)
            nbytes += self.rows_in_memory * FRAME_BYTES + int(PAGES_SHARE * of_rows + blocks)
        return nbytes

    @property
    def disk_bytes(self) -> int:
        """Returns the approximate bytes on disk.

        Rows on disk take 4/3 of the bytes of their values and keys.
        """
        if self.storage.spill is None:
            return 0
        return (self.field.rows - self.rows_in_memory) * (self.row_bytes + 8) * 4 // 3


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Describes the storage of all tables.

    Attributes:
        tables: Plan of each field's table, in order.
        needs: Bytes of memory for all rows, by row type `"dtype, slot_dtype"`.
        ranks: Minimum number of ranks that can hold all rows in memory, with sharded tables of the
            narrowest row type.
    """

    tables: tuple[TablePlan, ...]
    needs: Mapping[str, int]
    ranks: int

    @property
    def served(self) -> float:
        """Returns the fraction of all lookups that find their row in memory."""
        lookups = sum(table.field.lookups for table in self.tables)
        found = sum(table.served * table.field.lookups for table in self.tables)
        return found / lookups if lookups else 1.0

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes of memory of all tables."""
        return sum(table.memory_bytes for table in self.tables)

    @property
    def disk_bytes(self) -> int:
        """Returns the bytes on disk of all tables."""
        return sum(table.disk_bytes for table in self.tables)


def read_uses(folder: str) -> list[FieldUse]:
    """Reads from prepared data how often keys are used.

    Args:
        folder: Folder that `slipstream-prepare` wrote.

    Returns:
        The use of each table's keys, in the order of the fields.

    Raises:
        ValueError: If the folder has no statistics or they are damaged.
    """
    statistics = read_statistics(folder)
    allowed = f"a folder with {STATISTICS} and {COUNTS}. Run slipstream-prepare first"
    if "fields" not in statistics or not Path(folder, COUNTS).exists():
        raise invalid("data", folder, "a memory plan", allowed)
    counted = pq.read_table(Path(folder, COUNTS))
    names = counted["field"].combine_chunks().dictionary_encode()
    numbers = {name: i for i, name in enumerate(names.dictionary.to_pylist())}
    owner = names.indices.to_numpy(zero_copy_only=False)
    keys, counts = to_keys(counted["key"]), counted["count"].to_numpy()
    fields, tables = statistics["fields"], tables_of(read_manifest(folder))
    chosen = [owner == numbers.get(name, -1) for name in tables]
    uses = []
    for table, (_, found) in by_table(tables, [(keys[c], counts[c]) for c in chosen]).items():
        of_table = [fields[name] for name in tables if tables[name] == table]
        rows = len(found)
        if not all(field["is_exact"] for field in of_table):
            rows = sum(int(f["keys"]) + bool(f["missing_share"]) for f in of_table)
        uses.append(FieldUse(table, rows, sum(int(f["lookups"]) for f in of_table), found))
    return uses


def plan_memory(
    uses: Sequence[FieldUse], dim: int, slots: int, memory: int | str, spill: str | None
) -> MemoryPlan:
    """Chooses the storage of each table.

    Chooses the widest row type with which all rows fit into memory. If none fits and `spill` is
    given, the narrowest row type is used, the most used keys of all tables are kept in memory, and
    the other rows are stored on disk. Without `spill`, the plan contains the number of ranks that
    would be needed.

    Args:
        uses: Use of each field's keys.
        dim: Embedding dimension.
        slots: Number of optimizer slot values per row.
        memory: Bytes for all tables, or a text such as `"8GB"`.
        spill: Folder on the disk, or None.

    Returns:
        The plan. Without `spill`, its tables may need more memory than the limit: compare
        `MemoryPlan.memory_bytes`, or train on at least `MemoryPlan.ranks` ranks.

    Raises:
        ValueError: If the indexes of the keys do not fit into memory.
    """
    maximum = parse_bytes("memory", memory, "a memory plan")
    rows = sum(use.rows for use in uses)
    storages = {", ".join(kinds): Storage(*kinds) for kinds in _ROW_TYPES}
    needs = {name: rows * (s.row_bytes(dim, slots) + INDEX_BYTES) for name, s in storages.items()}
    fitting = [storages[name] for name, nbytes in needs.items() if nbytes <= maximum]
    storage = next(iter(fitting), Storage(*_ROW_TYPES[-1]))
    row_bytes, ranks = storage.row_bytes(dim, slots), max(1, -(-min(needs.values()) // maximum))
    if fitting or spill is None:
        tables = [TablePlan(use, storage, row_bytes, use.rows, 1.0) for use in uses]
        return MemoryPlan(tuple(tables), needs, ranks)
    left = maximum - rows * INDEX_BYTES
    # Blocks take a fraction of the rows' bytes, up to the maximum per table.
    of_row, max_blocks = row_bytes * (1 + PAGES_SHARE) + FRAME_BYTES, MAX_BLOCKS_BYTES * len(uses)
    of_first_row = of_row + BLOCKS_SHARE * row_bytes
    frames = int(max(left / of_first_row, (left - max_blocks) / of_row))
    if frames < 1:
        needed = rows * INDEX_BYTES + math.ceil(of_first_row)
        allowed = f"at least {needed:,} bytes for the index of {rows:,} keys and for one row"
        raise invalid("memory", memory, "a memory plan", allowed)
    tables = []
    for use, kept in zip(uses, _most_used(uses, frames), strict=True):
        nbytes = kept * row_bytes
        of_table = dataclasses.replace(storage, memory=max(nbytes, row_bytes), spill=spill)
        if kept == use.rows:
            of_table = storage
        tables.append(TablePlan(use, of_table, row_bytes, kept, use.served(kept)))
    return MemoryPlan(tuple(tables), needs, ranks)


def plan_hkv(
    uses: Sequence[FieldUse], dim: int, slot_tables: int, gpu_memory: int | str
) -> dict[str, dict[str, int]]:
    """Chooses the settings of SOK's HKV tables on one rank.

    SOK is NVIDIA's Sparse Operation Kit. HierarchicalKV (HKV) is its hash table, which stores rows
    in GPU and host memory.

    A table has room for at least 1.6 times its keys, so that buckets are rarely full. GPU memory is
    assigned in whole GiB, the unit of SOK, first to the tables with the most lookups per byte.

    Args:
        uses: Use of each field's keys.
        dim: Embedding dimension.
        slot_tables: Number of optimizer slots. Each slot is another table of the same size.
        gpu_memory: Bytes for all tables, or a text such as `"40GB"`.

    Returns:
        Keyword arguments of `sok.DynamicVariable`, by table name.

    Raises:
        ValueError: If the keys do not fit into GPU memory.
    """
    maximum = parse_bytes("gpu_memory", gpu_memory, "a memory plan")
    capacity = {
        use.name: 1 << max(0, math.ceil(HKV_ROOM * use.rows) - 1).bit_length() for use in uses
    }
    settings = {
        name: {"init_capacity": rows, "max_capacity": rows, "max_hbm_for_vectors": 0}
        for name, rows in capacity.items()
    }
    keys = sum(hkv.memory(found, dim, slot_tables).gpu for found in settings.values())
    if keys > maximum:
        allowed = f"at least {keys:,} bytes, because all keys must be in GPU memory"
        raise invalid("gpu_memory", gpu_memory, "a memory plan", allowed)
    left = (maximum - keys) // (1 + slot_tables) // _GIB
    for use in sorted(uses, key=lambda use: -use.lookups / capacity[use.name]):
        wanted = -(-4 * dim * capacity[use.name] // _GIB)
        settings[use.name]["max_hbm_for_vectors"] = min(wanted, left)
        left -= min(wanted, left)
    return settings


def _most_used(uses: Sequence[FieldUse], rows: int) -> list[int]:
    """Returns how many of the `rows` most used rows each table has."""
    counts = np.concatenate([use.counts for use in uses])
    owner = np.repeat(np.arange(len(uses)), [use.counts.size for use in uses])
    chosen = owner[np.argsort(-counts, kind="stable")[:rows]]
    kept = np.bincount(chosen, minlength=len(uses))
    # The remaining rows are assigned to keys without a count.
    left = rows - int(kept.sum())
    for index, use in enumerate(uses):
        more = min(left, use.rows - int(kept[index]))
        kept[index] += more
        left -= more
    return [int(n) for n in kept]
