"""16-bit rows compared with float32: AUC, bytes and step time.

    python benchmarks/row_types.py --part=auc
    python benchmarks/row_types.py --part=step

The AUC is measured with slipstream-train and its settings for the data. Runs with the same seed are
compared. A step consists of the two ops, as in embedding_step.py, and its ratio is computed within
a turn. Finished runs are not repeated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import awake
import common
import numpy as np
import peers
import summary
from absl import app, flags

from slipstream_tf import optimizers
from slipstream_tf.config import Storage

_PART = flags.DEFINE_enum("part", "auc", ["auc", "step"], "Measurement: test AUC or step time.")
_SEEDS = flags.DEFINE_list("seeds", [str(seed) for seed in range(10)], "Seeds of the runs.")
_DATA = flags.DEFINE_list(
    "data", list(common.DATASETS), "Names of the data sets. They are prepared first."
)
_RECORDS = flags.DEFINE_string("records", "runs/row_types", "Folder of the run records.")
_RUNS = flags.DEFINE_integer(
    "runs", 9, "With --part=step: number of turns per comparison.", lower_bound=1
)

# Dtype of rows and dtype of slots.
KINDS: Mapping[str, Storage] = {
    "float32": Storage(),
    "bfloat16": Storage("bfloat16"),
    "float16": Storage("float16"),
    "bfloat16_both": Storage("bfloat16", "bfloat16"),
}
MAX_LOST = 0.0005
# (tables, rows, dim) -> maximum ratio of a step to float32.
SHAPES = {(26, 100_000, 16): 1.0, (8, 1_000_000, 64): 1.0}
_BATCH, _STEPS, _THREADS, _RATE, _ZIPF = 2048, 50, 2, 0.01, 1.05


def differences(name: str, seeds: Sequence[int]) -> None:
    """Trains on one data set; prints and writes its part."""
    aucs: dict[str, list[float]] = {}
    for kind, storage in KINDS.items():
        aucs[kind] = []
        for seed in seeds:
            given = {**common.opened(name, seed), "seed": seed, "row_dtype": storage.dtype}
            given["slot_dtype"] = storage.slot_dtype
            record = common.train(given, Path(_RECORDS.value) / f"{name}-{kind}-{seed}")
            aucs[kind].append(record["test"]["auc"])
    lost = {
        kind: [of_floats - own for of_floats, own in zip(aucs["float32"], found, strict=True)]
        for kind, found in aucs.items()
        if kind != "float32"
    }
    columns = [
        summary.column("rows, slots", [reported(KINDS[kind]) for kind in KINDS]),
        summary.column("test AUC", list(aucs.values()), "{:.4f}", "mean of all seeds"),
        summary.column(
            "AUC loss", [None, *lost.values()], "{:+.5f}", "mean of all seeds, relative to float32"
        ),
    ]
    claims = {
        f"{name}_{kind}_max_auc_loss": summary.claim(found, MAX_LOST, "lower", max_lost)
        for kind, found in lost.items()
    }
    print(summary.write("row_types", f"AUC, {name}", {"": columns}, claims), flush=True)


def max_lost(differences: Sequence[float]) -> float:
    """Returns the upper end of the 95% interval of the mean."""
    found = common.interval(differences)
    return differences[0] if found is None else found[1]


def reported(storage: Storage) -> str:
    """Returns the names of both dtypes."""
    return f"{storage.dtype}, {storage.slot_dtype}"


def steps(tables: int, rows: int, dim: int, maximum: float) -> None:
    """Measures one shape; prints and writes its part."""
    keys = common.zipf_keys(np.random.default_rng(0), rows, (_STEPS, _BATCH, tables), _ZIPF)
    chosen = {
        kind: peers.Peer(kind, None, ["native.py", f"{storage.dtype},{storage.slot_dtype}"])
        for kind, storage in KINDS.items()
    }
    slots = optimizers.Adagrad().slots_per_row(dim)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "keys.npy"
        np.save(file, keys)
        settings = {
            "tables": tables, "rows": rows, "dim": dim, "batch": _BATCH, "slots": slots,
            "rule": "adagrad", "learning_rate": _RATE, "threads": _THREADS, "keys": str(file),
        }  # fmt: skip
        # A turn consists of one pass over the batches.
        turns = dict.fromkeys(chosen, 1)
        found, versions = peers.take_turns(chosen, settings, Path(), _RUNS.value, turns)
    ratios = {
        kind: [own / floats for own, floats in zip(found[kind], found["float32"], strict=True)]
        for kind in KINDS
    }
    columns = [
        summary.column("rows, slots", [reported(storage) for storage in KINDS.values()]),
        summary.column(
            "bytes of a row and its slots",
            [storage.row_bytes(dim, slots) for storage in KINDS.values()],
        ),
        summary.column(
            "time / float32",
            [None, *(ratios[kind] for kind in list(KINDS)[1:])],
            "{:.2f}",
            "median each",
        ),
        summary.column(
            "ms a step",
            [[ms / _STEPS for ms in found[kind]] for kind in KINDS],
            "{:.2f}",
            "median each",
        ),
    ]
    claims = {
        f"{kind}_step_over_float32_d{dim}": summary.claim(ratios[kind], maximum, "lower")
        for kind in list(KINDS)[1:]
    }
    part = f"a step, {tables} tables of {rows:,} rows x {dim}"
    print(summary.write("row_types", part, {"": columns}, claims, versions), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    if _PART.value == "auc":
        for name in _DATA.value:
            differences(name, common.integers("seeds", _SEEDS.value))
        return
    awake.keep()
    for shape, maximum in SHAPES.items():
        steps(*shape, maximum)


if __name__ == "__main__":
    app.run(main)
