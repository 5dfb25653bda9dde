"""Time per key, memory and growth of tables up to 50,000,000 keys.

Keys are hashed numbers. Each op call takes 26 x 2,048 distinct keys, drawn uniformly from the
table. At every size, the table and a small table take turns (A B A B ...), and ratios are computed
within a turn.

    python benchmarks/growth.py --runs=7
    python benchmarks/growth.py --memory=1GB --spill=/local/disk --runs=3 --steps=5

With --memory, the other rows are on disk. Keys are drawn uniformly and not prefetched, so most rows
are read from disk. An evaluation follows an update of the same rows.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import awake
import numpy as np
import summary
import tensorflow as tf
from absl import app, flags
from resident import return_free_memory

import slipstream_tf as slip
from slipstream_tf._utils.hashing import hash_keys
from slipstream_tf.ops import features
from slipstream_tf.tables import NativeStore

_SIZES = flags.DEFINE_list(
    "sizes",
    ["100000", "300000", "1000000", "3000000", "10000000", "30000000", "50000000"],
    "Table sizes to measure, in keys, in ascending order.",
)
_MAX_KEYS = flags.DEFINE_integer(
    "max_keys", None, "Maximum table size in keys. Larger --sizes are skipped.", lower_bound=1
)
_RUNS = flags.DEFINE_integer("runs", 7, "Number of turns per size.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Number of op calls per turn.", lower_bound=1)
_GROWTHS = flags.DEFINE_integer(
    "growths",
    3,
    "Number of times that a table grows from empty, for each value of --new.",
    lower_bound=1,
)
_BATCH = flags.DEFINE_integer("batch", 2048, "Examples per op call.", lower_bound=1)
_FEATURES = flags.DEFINE_integer("features", 26, "Keys per example.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 16, "Values per row.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 2, "Number of TensorFlow threads.", lower_bound=1)
_MEMORY = flags.DEFINE_string(
    "memory",
    None,
    "Memory for rows, such as 1GB. The other rows are on disk, and growth steps are "
    "not measured. Without it, all rows are in memory.",
)
_SPILL = flags.DEFINE_string(
    "spill", None, "With --memory: folder on a local disk for the other rows."
)
_NEW = flags.DEFINE_list("new", ["1", "0.1"], "Fractions of new keys per step while a table grows.")

_OPS = {"lookup": "lookup (training)", "update": "update (Adagrad)", "evaluation": "evaluation"}
_TABLE = "keys"
# Memory of a process with TensorFlow and the batches, without the table.
_BESIDE = 2 * 2**30
MAX_TIMES_AS_LONG, MAX_BYTES, MAX_TIMES_MEDIAN = 4.0, 24.0, 10.0
# Minimum number of keys for a claim about memory. Memory is allocated in huge pages, and with fewer
# keys in 64 shards the pages are mostly unused.
_ENOUGH_KEYS = 1_000_000
# Edges of the histogram of step times, as multiples of the median.
_EDGES = (0.0, 0.75, 1.25, 2.0, 3.0, 5.0, 10.0, np.inf)


@dataclasses.dataclass(frozen=True)
class Size:
    """Measurements of the table at one size.

    Attributes:
        keys: The number of keys.
        nanoseconds: Time per key for each op and turn.
        ratios: Time relative to the small table for each op and turn.
        load: The number of keys per slot of the index.
        resident_beyond_payload: Growth of the process's resident memory per row, excluding values
            and slots, after the first batch of rows. None if the system does not report it.
        allocated_beyond_payload: The same for the memory that the table has allocated, including
            untouched pages.
    """

    keys: int
    nanoseconds: Mapping[str, Sequence[float]]
    ratios: Mapping[str, Sequence[float]]
    load: float
    resident_beyond_payload: float | None
    allocated_beyond_payload: float


# Fraction of new keys -> seconds of the steps of each growth. All growths have the same keys.
Growths = Mapping[float, Sequence[Sequence[float]]]


def hashed(numbers: np.ndarray) -> np.ndarray:
    """Returns a distinct 64-bit key for each number, with splitmix64's finalizer."""
    return hash_keys(numbers).view(np.int64)


def distinct(rng: np.random.Generator, keys: int, count: int) -> np.ndarray:
    """Draws `count` distinct numbers below `keys` uniformly, in random order."""
    if 4 * count >= keys:
        return rng.permutation(keys)[:count]
    found = np.unique(rng.integers(0, keys, count))
    while len(found) < count:
        found = np.unique(np.append(found, rng.integers(0, keys, count - len(found))))
    return rng.permutation(found)


def bytes_needed(keys: int, payload: int) -> int:
    """Returns the memory for a table and the process.

    It allows 24 bytes per row in addition to the payload. The slabs of rows can temporarily be half
    empty.

    Args:
        keys: The number of keys.
        payload: The bytes per row of values and slots.
    """
    return keys * (payload + 24) + keys * payload // 8 + _BESIDE


def require_memory(keys: int, payload: int, available: int | None) -> None:
    """Raises app.UsageError, with the calculation, if the table does not fit."""
    needed = bytes_needed(keys, payload)
    if available is not None and needed > available:
        gib = 2**30
        raise app.UsageError(
            f"{keys:,} keys need {needed / gib:.1f} GiB: {keys:,} x ({payload} + 24 + "
            f"{payload // 8}) bytes + {_BESIDE / gib:.0f} GiB, but only {available / gib:.1f} GiB "
            f"are free. Expected --max_keys <= {largest_that_fits(payload, available)}."
        )


def largest_that_fits(payload: int, available: int) -> int:
    """Returns the maximum number of keys that `require_memory` accepts, at least 0."""
    return max(0, (available - _BESIDE) // (payload + 24 + payload // 8 + 1))


def available_memory() -> int | None:
    """Returns the bytes available without swapping; None if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    return None


class Table:
    """A table with Adagrad; its ops are called one by one."""

    def __init__(self, storage: slip.Storage | None = None) -> None:
        """Creates an empty table.

        Args:
            storage: The storage of the rows. None keeps them in memory.
        """
        storage = slip.Storage() if storage is None else storage
        self.store = NativeStore(
            [slip.Table(_TABLE, _DIM.value, storage=storage)],
            slip.optimizers.Adagrad(0.01, initial_accumulator_value=0.0, epsilon=1e-8),
        )
        names = [f"f{i}" for i in range(_FEATURES.value)]
        self._specs = [features.FeatureSpec(name, _TABLE) for name in names]
        shape = [_BATCH.value, _FEATURES.value, _DIM.value]
        self._gradient = tf.random.stateless_normal(shape, [0, 0])
        self.made = 0

    def step(self, keys: tf.Tensor) -> tuple[float, float]:
        """Looks up and updates rows; returns the seconds of both."""
        packed = features.pack(keys, self._specs)
        start = time.perf_counter()
        _, plan = self.store.lookup(packed, training=True, stacked=True)
        between = time.perf_counter()
        self.store.apply_gradients(plan, [self._gradient])
        return between - start, time.perf_counter() - between

    def evaluate(self, keys: tf.Tensor) -> float:
        """Looks up rows without training; returns the seconds."""
        packed = features.pack(keys, self._specs)
        start = time.perf_counter()
        self.store.lookup(packed, training=False, stacked=True)
        return time.perf_counter() - start

    def grow_to(self, keys: int, rng: np.random.Generator, new: float) -> list[float]:
        """Runs steps with new keys until the table has `keys` keys.

        The other keys of a step are distinct and exist in the table. The last step can have fewer
        new keys.

        Returns:
            The seconds of each step.
        """
        width = _BATCH.value * _FEATURES.value
        seconds = []
        while self.made < keys:
            fresh = min(max(1, round(new * width)), keys - self.made, width)
            # If the table has fewer keys than a batch, some keys repeat.
            old = rng.integers(0, max(self.made, 1), width - fresh)
            if self.made >= len(old):
                old = distinct(rng, self.made, len(old))
            numbers = np.concatenate([np.arange(self.made, self.made + fresh), old])
            batch = tf.constant(hashed(rng.permutation(numbers)).reshape(_BATCH.value, -1))
            seconds.append(sum(self.step(batch)))
            self.made += fresh
        return seconds

    def batches(self, rng: np.random.Generator) -> list[tf.Tensor]:
        """Returns batches of existing keys, distinct within a batch."""
        width = _BATCH.value * _FEATURES.value
        return [
            tf.constant(hashed(distinct(rng, self.made, width)).reshape(_BATCH.value, -1))
            for _ in range(_STEPS.value)
        ]

    def turn(self, batches: Sequence[tf.Tensor]) -> dict[str, float]:
        """Calls the ops with every batch; returns nanoseconds by op.

        Nanoseconds are per key, as the median over batches.
        """
        seconds: dict[str, list[float]] = {op: [] for op in _OPS}
        for batch in batches:
            lookup, update = self.step(batch)
            seconds["lookup"].append(lookup)
            seconds["update"].append(update)
        # Evaluate afterwards, because the rows of the latest step are in a CPU cache.
        seconds["evaluation"] = [self.evaluate(batch) for batch in batches]
        width = _BATCH.value * _FEATURES.value
        return {op: 1e9 * statistics.median(found) / width for op, found in seconds.items()}


@dataclasses.dataclass(frozen=True)
class Begun:
    """A table with one batch of rows, after a turn.

    All memory that does not grow with the rows has been allocated.

    Attributes:
        keys: The number of keys.
        resident: The resident memory of the process in bytes. None if unknown.
    """

    keys: int
    resident: int | None


def begin(storage: slip.Storage) -> tuple[Table, Begun]:
    """Creates a table with one batch of rows."""
    table, rng = Table(storage), np.random.default_rng(0)
    table.grow_to(_BATCH.value * _FEATURES.value, rng, 1.0)
    table.turn(table.batches(rng))
    gc.collect()
    return table, Begun(table.made, return_free_memory())


def measure_size(table: Table, small: Table, begun: Begun, payload: int) -> Size:
    """Measures time and memory of the table against the small table."""
    rng = np.random.default_rng(table.made)
    batches, of_small = table.batches(rng), small.batches(rng)
    table.turn(batches)
    small.turn(of_small)
    runs: dict[str, list[float]] = {op: [] for op in _OPS}
    ratios: dict[str, list[float]] = {op: [] for op in _OPS}
    for _ in range(_RUNS.value):
        if _SPILL.value is not None:
            # Draw other batches, because the previous ones are in memory.
            batches = table.batches(rng)
        others, found = small.turn(of_small), table.turn(batches)
        for op in _OPS:
            runs[op].append(found[op])
            ratios[op].append(found[op] / others[op])
    reported = table.store.statistics(_TABLE)
    if reported.rows != table.made:
        raise SystemExit(f"The table has {reported.rows:,} rows instead of {table.made:,}.")
    del batches, of_small
    resident, beyond = return_free_memory(), None
    if resident is not None and begun.resident is not None:
        beyond = (resident - begun.resident) / (reported.rows - begun.keys) - payload
    return Size(
        keys=reported.rows,
        nanoseconds=runs,
        ratios=ratios,
        load=reported.rows / reported.index_places,
        resident_beyond_payload=beyond,
        allocated_beyond_payload=reported.allocated_bytes / reported.rows - payload,
    )


def grow(new: float, keys: int) -> list[list[float]]:
    """Grows new tables in sequence; returns the seconds of each step."""
    growths = []
    for number in range(_GROWTHS.value):
        print(f"growth {number + 1} of {_GROWTHS.value}, {new:.0%} new keys ...", flush=True)
        table = Table()
        # The same keys in each growth, so that delays caused by the table occur in the same step.
        growths.append(table.grow_to(keys, np.random.default_rng(0), new))
        del table
        gc.collect()
        return_free_memory()
    return growths


def read_settings() -> tuple[list[int], list[float]]:
    """Returns the sizes and the fractions of new keys.

    Raises:
        app.UsageError: If a flag is out of range.
    """
    try:
        sizes = [int(float(text)) for text in _SIZES.value]
    except ValueError:
        raise app.UsageError(
            f"Invalid --sizes={','.join(_SIZES.value)}. Expected integers."
        ) from None
    try:
        shares = [float(text) for text in _NEW.value]
    except ValueError:
        shares = [0.0]
    if not all(0.0 < fraction <= 1.0 for fraction in shares):
        raise app.UsageError(f"Invalid --new={','.join(_NEW.value)}. Expected fractions in (0, 1].")
    width = _BATCH.value * _FEATURES.value
    sizes = [size for size in sizes if _MAX_KEYS.value is None or size <= _MAX_KEYS.value]
    if sorted(set(sizes)) != sizes or not sizes or sizes[0] <= width:
        raise app.UsageError(
            f"Invalid --sizes up to --max_keys: {sizes}. Expected at least one size, in ascending "
            f"order, above {width:,} (--batch x --features), because the keys of a call differ."
        )
    return sizes, shares


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    sizes, shares = read_settings()
    payload = 2 * 4 * _DIM.value  # Values and Adagrad slots.
    storage = slip.Storage(memory=_MEMORY.value, spill=_SPILL.value)
    if _SPILL.value is None:
        require_memory(sizes[-1], payload, available_memory())
    else:
        shares = []
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    tf.config.threading.set_inter_op_parallelism_threads(_THREADS.value)

    awake.keep()
    rng = np.random.default_rng(0)
    small = Table()
    small.grow_to(sizes[0], rng, 1.0)
    small.turn(small.batches(rng))
    table, begun = begin(storage)
    found: list[Size] = []
    for size in sizes:
        table.grow_to(size, rng, 1.0)
        found.append(measure_size(table, small, begun, payload))
        print(
            f"{size:,} keys: {statistics.median(found[-1].nanoseconds['lookup']):.1f} ns a lookup",
            flush=True,
        )
    del table, small
    gc.collect()
    growths: dict[float, Sequence[Sequence[float]]] = {}
    for fraction in shares:
        # Write after each growth, so that an interrupted benchmark keeps its results.
        write(found, growths)
        growths[fraction] = grow(fraction, sizes[-1])
    print(f"\n{write(found, growths)}")


def write(found: Sequence[Size], growths: Growths) -> str:
    """Writes the summary and returns its page."""
    part = f"rows of {_DIM.value}, up to {found[-1].keys:,} keys"
    if _SPILL.value is not None:
        part = f"{part}, {_MEMORY.value} of rows in memory"
        tables = {"Time per key, others on disk": tables_of(found, growths)["Time per key"]}
        return summary.write("growth", part, tables, {})
    return summary.write("growth", part, tables_of(found, growths), claims_of(found, growths))


def claims_of(sizes: Sequence[Size], growths: Growths) -> dict[str, Any]:
    """Returns the claims for the largest size and for the slowest step."""
    enough = [size.resident_beyond_payload for size in sizes if size.keys >= _ENOUGH_KEYS]
    claims = {
        f"{op}_time_ratio": summary.claim(sizes[-1].ratios[op], MAX_TIMES_AS_LONG) for op in _OPS
    }
    last = [sizes[-1].resident_beyond_payload]
    claims["bytes_beyond_payload"] = summary.claim(last, MAX_BYTES)
    worst = max((size for size in enough if size is not None), default=None)
    claims["bytes_beyond_payload_worst_size"] = summary.claim([worst], MAX_BYTES)
    for fraction, runs in growths.items():
        typical, *_, worst_growth = [in_medians(np.median(runs, axis=0)).max(),
                                     *sorted(in_medians(run).max() for run in runs)]  # fmt: skip
        name = f"slowest_step_{100 * fraction:g}_percent_new"
        claims[name] = summary.claim([typical], MAX_TIMES_MEDIAN)
        claims[f"{name}_worst_growth"] = summary.claim([worst_growth], MAX_TIMES_MEDIAN)
    return claims


def in_medians(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns step times as multiples of their median."""
    return np.asarray(seconds) / np.median(seconds)


def tables_of(sizes: Sequence[Size], growths: Growths) -> dict[str, Any]:
    """Returns the tables of times, bytes and steps during growth."""
    cells = [(size, op) for size in sizes for op in _OPS]
    tables = {
        "Time per key": [
            summary.column("keys", [size.keys for size, _ in cells], "{:,}"),
            summary.column("op", [_OPS[op] for _, op in cells]),
            summary.column(
                "time ratio", [size.ratios[op] for size, op in cells], "{:.2f}", "median each"
            ),
            summary.column("ns", [size.nanoseconds[op] for size, op in cells], "{:.1f}", "median"),
        ],
        "Bytes per row beyond the payload": [
            summary.column("keys", [size.keys for size in sizes], "{:,}"),
            summary.column("resident", [s.resident_beyond_payload for s in sizes], "{:.1f}"),
            summary.column("allocated", [s.allocated_beyond_payload for s in sizes], "{:.1f}"),
            summary.column("index load", [size.load for size in sizes], "{:.3f}"),
        ],
    }
    steps = [
        (fraction, name, 1e3 * np.asarray(seconds))
        for fraction, runs in growths.items()
        for name, seconds in [
            *((str(number + 1), run) for number, run in enumerate(runs)),
            ("median of each step", np.median(runs, axis=0)),
        ]
    ]
    if steps:
        counts = np.array([np.histogram(in_medians(ms), _EDGES)[0] for *_, ms in steps])
        names = [*(f"to {edge:g} medians" for edge in _EDGES[1:-1]), f"over {_EDGES[-2]:g}"]
        tables["Steps while the table grows from empty"] = [
            summary.column("new keys", [fraction for fraction, *_ in steps], "{:.0%}"),
            summary.column("growth", [name for _, name, _ in steps]),
            summary.column("steps", [len(ms) for *_, ms in steps], "{:,}"),
            summary.column("median ms", [np.median(ms) for *_, ms in steps], "{:.2f}"),
            summary.column("p99", [np.percentile(ms, 99) for *_, ms in steps], "{:.2f}"),
            summary.column("maximum", [ms.max() for *_, ms in steps], "{:.2f}"),
            *(
                summary.column(name, list(map(int, column)), "{:,}")
                for name, column in zip(names, counts.T, strict=True)
            ),
        ]
    return tables


if __name__ == "__main__":
    app.run(main)
