"""Accuracy of slipstream-plan: planned against measured memory, reads and step time.

    python benchmarks/plan_error.py --spill=/local/disk

The data is clicks with eight fields and keys with a frequency of 1 / rank. slipstream-plan plans
for a memory that fits all rows, and for smaller memories. Tables with the planned settings are then
trained: a pass over the training part creates the rows, and 400 steps are measured. A step consists
of lookups and updates only, and each batch is prefetched.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import awake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import summary
import tensorflow as tf
from absl import app, flags
from larger_than_memory_case import resident_bytes

import slipstream_tf as slip
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore

_SPILL = flags.DEFINE_string(
    "spill", None, "Folder on a local disk for spilled rows.", required=True
)
_CLICKS = flags.DEFINE_integer("clicks", 3_000_000, "Number of prepared examples.", lower_bound=1)
_KEYS = flags.DEFINE_integer("keys", 5_000_000, "Maximum number of keys per field.", lower_bound=1)
_SHARES = flags.DEFINE_list(
    "shares", ["100", "40", "20"], "Memory budgets, as percentages of the memory of all rows."
)
_READS = flags.DEFINE_integer(
    "reads_per_second", 80_000, "Random reads per second of the disk, as reported by fio."
)
_CASE = flags.DEFINE_string("case", None, "Internal: settings of one run as JSON.")
_DIM, _BATCH, _STEPS, _FIELDS = 32, 2048, 400, 8


def write_clicks(folder: str) -> list[str]:
    """Writes clicks as Parquet and their schema; returns flags of slipstream-prepare."""
    generator = np.random.default_rng(0)
    names = [f"f{i}" for i in range(_FIELDS)]
    columns: dict[str, np.ndarray] = {"click": generator.integers(0, 2, _CLICKS.value)}
    for number, name in enumerate(names):
        ranks = np.floor(_KEYS.value ** generator.random(_CLICKS.value)).astype(np.int64)
        columns[name] = ranks * 1_000_003 + number
    pq.write_table(pa.table(columns), f"{folder}/clicks.parquet")
    with open(f"{folder}/schema.json", "w", encoding="utf-8") as file:
        json.dump({"label": "click", "keys": names}, file)
    return [f"--schema={folder}/schema.json", f"{folder}/clicks.parquet"]


def plan_of(folder: str, memory: int) -> dict[str, Any]:
    """Returns the output of slipstream-plan."""
    command = [
        sys.executable, "-m", "slipstream_tf.cli.plan", f"--data={folder}", f"--memory={memory}",
        f"--spill={_SPILL.value}", f"--dim={_DIM}", "--json",
        f"--reads_per_second={_READS.value}",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def batches(folder: str, names: Sequence[str]) -> Iterator[dict[str, tf.Tensor]]:
    """Yields the keys of the training part, repeatedly."""
    while True:
        for features, *_ in PreparedReader(folder, _BATCH, "train").dataset().prefetch(2):
            keys = features["keys"]
            parts = keys
            if not isinstance(keys, dict):
                parts = dict(zip(names, tf.unstack(keys, axis=1), strict=True))
            yield {name: parts[name] for name in names}


def run(folder: str, plan: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Trains the tables of a plan; returns step time, reads and memory."""
    names = list(plan["tables"])
    tables = [
        slip.Table(
            name,
            _DIM,
            storage=slip.Storage(
                table["dtype"], table["slot_dtype"], table["memory"], table["spill"]
            ),
        )
        for name, table in plan["tables"].items()
    ]
    specs = [FeatureSpec(name, name) for name in names]
    source = batches(folder, names)
    gradients = [tf.fill([_BATCH, _DIM], 1e-3)] * len(names)

    def make(tables: Sequence[slip.Table]) -> tuple[NativeStore, Any]:
        store = NativeStore(tables, slip.optimizers.Adagrad(0.01, 0.1))

        @tf.function(reduce_retracing=True)
        def train(now: dict[str, tf.Tensor], following: dict[str, tf.Tensor]) -> None:
            store.prefetch_rows(pack(following, specs))
            rows, plan = store.lookup(pack(now, specs), training=True)
            with tf.control_dependencies(rows):
                store.apply_gradients(plan, gradients)

        return store, train

    # Exclude the memory of the process without tables.
    batch = next(source)
    make([slip.Table(name, _DIM) for name in names])[1](batch, batch)
    begun = resident_bytes()
    store, train = make(tables)
    times, before = [], 0

    def reads() -> int:
        return sum(store.spill_statistics(name).rows_read for name in names)

    for step in itertools.count():
        if step == steps:
            before = reads()
        if step == steps + _STEPS:
            break
        following = next(source)
        while len(following[names[0]]) < _BATCH:
            following = next(source)
        start = time.perf_counter()
        train(batch, following)
        times.append(time.perf_counter() - start)
        batch = following
    spills = [store.spill_statistics(name) for name in names]
    return {
        "step_ms": float(np.median(times[steps:]) * 1e3),
        "misses": (reads() - before) / _STEPS,
        "memory_bytes": resident_bytes() - begun,
        "disk_bytes": sum(table.disk_bytes for table in spills),
    }


def run_apart(folder: str, plan: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Calls `run` in a separate process.

    The measured memory is then due to the tables.
    """
    case = json.dumps({"folder": folder, "plan": plan, "steps": steps})
    command = [sys.executable, __file__, f"--spill={_SPILL.value}", f"--case={case}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    if _CASE.value is not None:
        print(json.dumps(run(**json.loads(_CASE.value))), flush=True)
        return
    awake.keep()
    with tempfile.TemporaryDirectory(dir=_SPILL.value) as folder:
        data = f"{folder}/data"
        subprocess.run(
            [sys.executable, "-m", "slipstream_tf.cli.prepare", f"--output={data}",
             *write_clicks(folder)],
            check=True,
        )  # fmt: skip
        whole = plan_of(data, 1 << 40)
        rows = sum(table["rows"] for table in whole["tables"].values())
        examples = PreparedReader(data, _BATCH, "train").spec.num_examples
        # The rows are created in one pass over the data.
        steps = -(-int(examples or 0) // _BATCH)
        plans, runs = [], []
        for fraction in _SHARES.value:
            memory = int(whole["memory_bytes"] * float(fraction) / 100)
            plans.append(plan_of(data, max(memory, 1)))
            runs.append(run_apart(data, plans[-1], steps))
            print(
                json.dumps({"fraction": fraction, "plan": plans[-1]["step"], **runs[-1]}),
                flush=True,
            )
    planned = [max(p["step"]["in_memory_ms"], p["step"]["disk_ms"]) for p in plans]
    errors = {
        "step": [p / r["step_ms"] for p, r in zip(planned, runs, strict=True)],
        "misses": [
            p["step"]["misses"] / r["misses"] if r["misses"] else 1.0
            for p, r in zip(plans, runs, strict=True)
        ],
        "memory": [p["memory_bytes"] / r["memory_bytes"] for p, r in zip(plans, runs, strict=True)],
    }
    columns = [
        summary.column("memory / bytes of all rows", [f"{s}%" for s in _SHARES.value]),
        summary.column("ms a step, planned", planned, "{:.1f}"),
        summary.column("ms a step", [r["step_ms"] for r in runs], "{:.1f}"),
        summary.column("reads a step, planned", [p["step"]["misses"] for p in plans], "{:,.0f}"),
        summary.column("reads a step", [r["misses"] for r in runs], "{:,.0f}"),
        summary.column("GB of memory, planned", [p["memory_bytes"] / 1e9 for p in plans], "{:.2f}"),
        summary.column("GB of memory", [r["memory_bytes"] / 1e9 for r in runs], "{:.2f}"),
        summary.column("GB on disk, planned", [p["disk_bytes"] / 1e9 for p in plans], "{:.2f}"),
        summary.column("GB on disk", [r["disk_bytes"] / 1e9 for r in runs], "{:.2f}"),
    ]
    claims = {
        f"{name}_planned_over_measured": summary.claim(values, None)
        for name, values in errors.items()
    }
    print(summary.write("plan_error", f"{rows:,} rows", {"": columns}, claims), flush=True)


if __name__ == "__main__":
    app.run(main)
