"""`slipstream-plan`: estimates the memory of the tables and suggests storage settings.

The program reads the statistics that `slipstream-prepare` wrote. It prints a table of the memory
per row dtype, the estimated time per step, and `Table` settings as Python code.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream_tf import optimizers
from slipstream_tf.cli.flag_set import (
    Choice,
    Flag,
    FlagSet,
    Integer,
    Size,
    Text,
    UsageError,
    raised_as,
)
from slipstream_tf.cli.program import import_tensorflow, run_program

if TYPE_CHECKING:
    # The functions import TensorFlow, so that --help prints at once.
    from slipstream_tf.data.memory_plan import MemoryPlan

_FLAGS = {
    "Plan": (
        Flag("data", Text(), "folder that slipstream-prepare wrote"),
        Flag("memory", Size(), "maximum memory for all tables of a rank"),
        Flag("spill", Text(), "folder on a local disk for rows that exceed --memory", None,
             "none"),
        Flag("dim", Integer(1, 65536), "number of values per embedding row", 16),
        Flag("rows_optimizer", Choice(optimizers.NAMES), "optimizer of the embedding rows, which "
             "determines the number of slots per row", "adagrad"),
        Flag("batch_size", Integer(1, 1 << 24), "examples per step", 2048),
        Flag("reads_per_second", Integer(1, 1 << 30),
             "rows that the disk can read per second; measure them, for example, with random reads "
             "of 4 KiB and a queue depth of 32 in fio", 80_000),
        Flag("gpu_memory", Size(), "maximum GPU memory for all tables of a rank; also prints "
             "settings of HKV tables in SOK, NVIDIA's Sparse Operation Kit", None,
             "no HKV tables"),
        Flag("json", None, "print the plan as a JSON object with bytes, rows and fractions"),
    ),
}  # fmt: skip
_MEASURED_ROWS = 200_000
_MEASURED_SECONDS = 1.0


def make_flags() -> FlagSet:
    """Returns the flags of `slipstream-plan`."""
    return FlagSet(
        "slipstream-plan",
        "Estimates the memory that the tables of prepared data need with each row dtype, the rows "
        "that fit into --memory, the fraction of accesses that these rows serve, and the time per "
        "step. Prints the tables as Python code.",
        ("slipstream-plan --data=criteo --memory=8GB --spill=/local/disk --dim=32",),
        _FLAGS,
    )


def nanoseconds_per_access(dim: int, optimizer: Any, batch_size: int) -> float:
    """Measures the time of a row's lookup and update in memory.

    The measurement takes about a second on this machine.

    Args:
        dim: Number of values per row.
        optimizer: Optimizer of the rows.
        batch_size: Number of examples per step, each with one key.

    Returns:
        The mean nanoseconds per lookup with its update.
    """
    import numpy as np
    import tensorflow as tf

    from slipstream_tf.config import Table
    from slipstream_tf.ops.features import FeatureSpec, pack
    from slipstream_tf.tables import NativeStore

    store = NativeStore([Table("t", dim)], optimizer)
    store.write_rows("t", np.arange(_MEASURED_ROWS), np.zeros((_MEASURED_ROWS, dim), np.float32))
    specs = [FeatureSpec("t", "t")]
    # Keys of click logs follow a Zipf-like distribution.
    keys = np.random.default_rng(0).zipf(1.05, (16, batch_size)) % _MEASURED_ROWS
    batches = [tf.constant(part) for part in keys]
    gradient = tf.fill([batch_size, dim], 1e-3)

    @tf.function
    def train(batch: tf.Tensor) -> None:
        (rows,), plan = store.lookup(pack({"t": batch}, specs), training=True)
        with tf.control_dependencies([rows]):
            store.apply_gradients(plan, [gradient])

    train(batches[0])
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < _MEASURED_SECONDS:
        train(batches[steps % len(batches)])
        steps += 1
    return (time.perf_counter() - start) / steps / batch_size * 1e9


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Computes and prints the plan.

    Raises:
        UsageError: If a flag is missing or the plan is impossible with the given memory.
    """
    needed = {"data": "a folder that slipstream-prepare wrote", "memory": "a size, for example 8GB"}
    for name, allowed in needed.items():
        if values[name] is None:
            raise UsageError(f"Missing flag --{name}. Expected {allowed}; see --help.")
    import_tensorflow()
    from slipstream_tf.data.memory_plan import plan_hkv, plan_memory, read_uses
    from slipstream_tf.data.statistics import read_statistics

    dim, optimizer = values["dim"], optimizers.get(values["rows_optimizer"])
    with raised_as(UsageError, ""):
        uses = read_uses(values["data"])
        slots = optimizer.slots_per_row(dim)
        found = plan_memory(uses, dim, slots, values["memory"], values["spill"])
    inputs = read_statistics(values["data"])["inputs"]["train"]
    accesses = values["batch_size"] * sum(use.lookups for use in uses) / max(1, inputs)
    # Measure with the keys of all tables together, because a single table's batch would be too
    # small for a precise measurement.
    nanoseconds = nanoseconds_per_access(dim, optimizer, min(round(accesses) or 1, 1 << 17))
    misses = accesses * (1 - found.served)
    step = {
        "accesses": accesses,
        "misses": misses,
        "in_memory_ms": accesses * nanoseconds / 1e6,
        "disk_ms": misses / values["reads_per_second"] * 1e3,
    }
    of_hkv: dict[str, dict[str, int]] = {}
    slot_tables = -(-optimizer.slots_per_row(dim) // dim)
    if values["gpu_memory"] is not None:
        with raised_as(UsageError, ""):
            of_hkv = plan_hkv(uses, dim, slot_tables, values["gpu_memory"])
    if values["json"]:
        print(json.dumps({**as_json(found, step), "hkv": of_hkv}))
        return
    print(text_of(found, step, dim))
    if of_hkv:
        print("\n".join(["", *hkv_lines(of_hkv, dim, slot_tables)]))


def hkv_lines(settings: dict[str, dict[str, int]], dim: int, slot_tables: int) -> list[str]:
    """Returns memory and settings of SOK's HierarchicalKV (HKV) tables as text.

    Args:
        settings: Keyword arguments of each table, see `plan_hkv`.
        dim: Number of values per row.
        slot_tables: Number of additional tables of the same size for optimizer slots.
    """
    from slipstream_tf.tables.sok import hkv

    taken = [hkv.memory(found, dim, slot_tables) for found in settings.values()]
    return [
        f"HKV tables in SOK need {_size(sum(table.gpu for table in taken))} of GPU memory and "
        f"{_size(sum(table.host for table in taken))} of host memory.",
        "",
        "settings = {",
        *(f"    {name!r}: {found}," for name, found in settings.items()),
        "}",
    ]


def as_json(found: MemoryPlan, step: dict[str, float]) -> dict[str, Any]:
    """Returns the plan as a JSON-serializable dictionary.

    Args:
        found: The plan.
        step: Numbers per step: "accesses" of rows, "misses" (accesses of rows on disk),
            "in_memory_ms" and "disk_ms".
    """
    tables = {
        table.field.name: {
            "rows": table.field.rows,
            **_values(table, "rows_in_memory", "served", "row_bytes"),
            **_values(table.storage, "memory", "dtype", "slot_dtype", "spill"),
        }
        for table in found.tables
    }
    of_plan = _values(found, "ranks", "served", "memory_bytes", "disk_bytes")
    return {"needs": dict(found.needs), "step": step, **of_plan, "tables": tables}


def _values(of: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def text_of(found: MemoryPlan, step: dict[str, float], dim: int) -> str:
    """Returns the plan as tables, step time and Python code.

    Args:
        found: The plan.
        step: Numbers per step, as for `as_json`.
        dim: Number of values per row.
    """
    from slipstream_tf.telemetry.table import format_table

    needs = [(kind, _size(nbytes)) for kind, nbytes in found.needs.items()]
    rows = [
        (
            table.field.name,
            f"{table.field.rows:,}",
            _size(table.field.rows * table.row_bytes),
            f"{table.rows_in_memory / max(1, table.field.rows):.1%}",
            f"{table.served:.2%}",
        )
        for table in found.tables
    ]
    header = ("table", "rows", "bytes", "in memory", "accesses served from memory")
    longest = max(step["in_memory_ms"], step["disk_ms"])
    lines = [
        format_table(("dtypes of all rows and slots", "bytes with index"), needs),
        "",
        format_table(header, rows),
        "",
        f"The tables need {_size(found.memory_bytes)} of memory and {_size(found.disk_bytes)} on "
        f"disk. Memory serves {found.served:.2%} of the accesses.",
        f"The rows of a step take about {longest:.1f} ms: {step['in_memory_ms']:.1f} ms for "
        f"{step['accesses']:,.0f} accesses in memory, and at the same time {step['disk_ms']:.1f} "
        f"ms for {step['misses']:,.0f} reads from disk.",
    ]
    if found.ranks > 1:
        if all(table.storage.spill is None for table in found.tables):
            lines.append("The tables exceed --memory. Pass --spill to store some rows on disk.")
        lines.append(
            f"To keep all rows in memory, train on at least {found.ranks} ranks with "
            "placement='sharded' and this memory per rank."
        )
    return "\n".join([*lines, "", *code_of(found, dim)])


def code_of(found: MemoryPlan, dim: int) -> list[str]:
    """Returns the definitions of the tables as lines of Python."""
    lines = ["tables = ["]
    for table in found.tables:
        settings = [repr(table.storage.dtype), repr(table.storage.slot_dtype)]
        if table.storage.spill is not None:
            memory = table.storage.memory
            settings += [f"memory={memory}", f"spill={table.storage.spill!r}"]
        storage = f"slip.Storage({', '.join(settings)})"
        lines.append(f"    slip.Table({table.field.name!r}, dim={dim}, storage={storage}),")
    return [*lines, "]"]


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Runs the program, then exits the process."""
    sys.exit(run_program(make_flags(), main, arguments))


if __name__ == "__main__":
    entry_point()
