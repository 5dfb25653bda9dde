"""What tables of prepared data need: bytes by row type, what fits in memory, what the disk serves.

In: `statistics.json` and `counts.parquet` of `slipstream-prepare`, a memory. Out: a `Storage` for
each table, and the share of the accesses that find their rows in memory.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from slipstream_tf._utils.errors import invalid
from slipstream_tf.config import Storage, parse_bytes
from slipstream_tf.data.statistics import COUNTS, STATISTICS, read_statistics
from slipstream_tf.tables.sok import hkv

# Bytes of a key in the index: entries of 16 that are 64% to 80% in use.
INDEX_BYTES = 24
# Of a row in memory whose table spills: its key, where it is on disk and when it was used.
FRAME_BYTES = 16
# Of Storage.memory: what pages that are read ahead, and blocks that are written, take more at most;
# blocks of a table take so many bytes in all at most.
PAGES_SHARE, BLOCKS_SHARE, MOST_BLOCKS_BYTES = 0.125, 0.25, 64 << 20
# Rows that an HKV table has room for, for each key.
HKV_ROOM = 1.6
_GIB = 1 << 30
# In which order row types are tried.
_ROW_TYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


@dataclasses.dataclass(frozen=True)
class FieldUse:
    """How the keys of a field are used.

    Attributes:
        name: of the field, and of its table.
        rows: keys that there are.
        lookups: of all keys, in the training part.
        counts: int64 [n], lookups of the most used keys, highest first; all keys, or fewer.
    """

    name: str
    rows: int
    lookups: int
    counts: np.ndarray

    def served(self, rows: int) -> float:
        """Returns the share of the lookups that go to so many of the most used keys."""
        if self.lookups == 0 or rows >= self.rows:
            return 1.0
        known = int(self.counts[:rows].sum())
        # Keys that were not counted are used alike.
        others = max(0, rows - self.counts.size)
        left = max(0, self.lookups - int(self.counts.sum()))
        more = left * others / max(1, self.rows - self.counts.size)
        return min(1.0, (known + more) / self.lookups)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """How a table is to be kept.

    Attributes:
        field: whose rows they are.
        storage: the setting.
        row_bytes: of a row and its slots.
        rows_in_memory: of `field.rows`.
        served: share of its lookups whose rows are there.
    """

    field: FieldUse
    storage: Storage
    row_bytes: int
    rows_in_memory: int
    served: float

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory, the index with it."""
        nbytes = self.rows_in_memory * self.row_bytes + self.field.rows * INDEX_BYTES
        if self.storage.spill is not None:
            of_rows = self.rows_in_memory * self.row_bytes
            blocks = min(BLOCKS_SHARE * of_rows, MOST_BLOCKS_BYTES)
            nbytes += self.rows_in_memory * FRAME_BYTES + int(PAGES_SHARE * of_rows + blocks)
        return nbytes

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk, mostly: four thirds of the rows there, with their keys."""
        if self.storage.spill is None:
            return 0
        return (self.field.rows - self.rows_in_memory) * (self.row_bytes + 8) * 4 // 3


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """How the tables are to be kept.

    Attributes:
        tables: of each field, in order.
        needs: row type "dtype, slot_dtype" -> bytes of memory of all rows in it.
        ranks: least number whose memory holds all rows of the plan's type, sharded, without a disk.
    """

    tables: tuple[TablePlan, ...]
    needs: Mapping[str, int]
    ranks: int

    @property
    def served(self) -> float:
        """Share of all lookups whose rows are in memory."""
        lookups = sum(table.field.lookups for table in self.tables)
        found = sum(table.served * table.field.lookups for table in self.tables)
        return found / lookups if lookups else 1.0

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of all tables."""
        return sum(table.memory_bytes for table in self.tables)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk of all tables."""
        return sum(table.disk_bytes for table in self.tables)


def read_uses(folder: str) -> list[FieldUse]:
    """Reads how the keys of prepared data are used.

    Raises:
        ValueError: the folder has no statistics, or they are damaged.
    """
    statistics = read_statistics(folder)
    allowed = f"a folder that slipstream-prepare wrote, with {STATISTICS} and {COUNTS}"
    if "fields" not in statistics or not Path(folder, COUNTS).exists():
        raise invalid("data", folder, "a plan", allowed)
    counted = pq.read_table(Path(folder, COUNTS))
    names = counted["field"].combine_chunks().dictionary_encode()
    numbers = {name: i for i, name in enumerate(names.dictionary.to_pylist())}
    owner = names.indices.to_numpy(zero_copy_only=False)
    counts = counted["count"].to_numpy()
    return [
        FieldUse(
            name,
            int(field["keys"]),
            int(field["lookups"]),
            counts[owner == numbers[name]] if name in numbers else np.empty(0, np.int64),
        )
        for name, field in statistics["fields"].items()
    ]


def plan_memory(
    uses: Sequence[FieldUse], dim: int, slots: int, memory: int | str, spill: str | None
) -> MemoryPlan:
    """Chooses how tables are kept: the widest row type that fits; else rows on disk, or ranks.

    The memory goes to the keys that are used most, whatever their table.

    Args:
        uses: how their keys are used.
        dim: values of a row.
        slots: values of its optimizer.
        memory: bytes for all tables, or a text such as "8GB".
        spill: a folder on the disk; None: there is none.

    Raises:
        ValueError: not even the indexes fit.
    """
    most = parse_bytes("memory", memory, "a plan")
    rows = sum(use.rows for use in uses)
    storages = {", ".join(kinds): Storage(*kinds) for kinds in _ROW_TYPES}
    needs = {name: rows * (s.row_bytes(dim, slots) + INDEX_BYTES) for name, s in storages.items()}
    fitting = [storages[name] for name, nbytes in needs.items() if nbytes <= most]
    storage = next(iter(fitting), Storage(*_ROW_TYPES[-1]))
    row_bytes, ranks = storage.row_bytes(dim, slots), max(1, -(-min(needs.values()) // most))
    if fitting or spill is None:
        tables = [TablePlan(use, storage, row_bytes, use.rows, 1.0) for use in uses]
        return MemoryPlan(tuple(tables), needs, ranks)
    left = most - rows * INDEX_BYTES
    # Blocks take a share of the rows' bytes, or the most that they do.
    of_row, most_blocks = row_bytes * (1 + PAGES_SHARE) + FRAME_BYTES, MOST_BLOCKS_BYTES * len(uses)
    frames = int(max(left / (of_row + BLOCKS_SHARE * row_bytes), (left - most_blocks) / of_row))
    if frames < 1:
        allowed = f"more than {rows * INDEX_BYTES:,} bytes, which the index of {rows:,} keys takes"
        raise invalid("memory", memory, "a plan", allowed)
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
    """Chooses the settings of SOK's HKV tables, on one rank.

    A table has room for 1.6 times its keys, so that hardly a bucket is full. The GPU's memory goes
    first to the tables with most lookups a byte, in whole GiB, as SOK takes it.

    Args:
        uses: how their keys are used.
        dim: values of a row.
        slot_tables: slots of the optimizer, each of which is a table as large.
        gpu_memory: bytes for all tables, or a text such as "40GB".

    Returns:
        Table -> keyword arguments of `sok.DynamicVariable`.

    Raises:
        ValueError: not even the keys fit on the GPU.
    """
    most = parse_bytes("gpu_memory", gpu_memory, "a plan")
    capacity = {
        use.name: 1 << max(0, math.ceil(HKV_ROOM * use.rows) - 1).bit_length() for use in uses
    }
    settings = {
        name: {"init_capacity": rows, "max_capacity": rows, "max_hbm_for_vectors": 0}
        for name, rows in capacity.items()
    }
    keys = sum(hkv.memory(found, dim, slot_tables).gpu for found in settings.values())
    if keys > most:
        allowed = f"at least {keys:,} bytes, which the keys take"
        raise invalid("gpu_memory", gpu_memory, "a plan", allowed)
    left = (most - keys) // (1 + slot_tables) // _GIB
    for use in sorted(uses, key=lambda use: -use.lookups / capacity[use.name]):
        wanted = -(-4 * dim * capacity[use.name] // _GIB)
        settings[use.name]["max_hbm_for_vectors"] = min(wanted, left)
        left -= min(wanted, left)
    return settings


def _most_used(uses: Sequence[FieldUse], rows: int) -> list[int]:
    """Returns how many rows of each table are among so many that are used most."""
    counts = np.concatenate([use.counts for use in uses])
    owner = np.repeat(np.arange(len(uses)), [use.counts.size for use in uses])
    chosen = owner[np.argsort(-counts, kind="stable")[:rows]]
    kept = np.bincount(chosen, minlength=len(uses))
    # What is left goes to keys that were not counted.
    left = rows - int(kept.sum())
    for index, use in enumerate(uses):
        more = min(left, use.rows - int(kept[index]))
        kept[index] += more
        left -= more
    return [int(n) for n in kept]
