"""Examples per second of a DLRM step, compared with PyTorch + FBGEMM.

The model has Criteo's shape: 13 numbers, 26 tables x 16, MLPs 13-512-256-64-16 and 512-256-1, batch
2,048, one Zipf 1.05 key per table, Adagrad. Each library runs in its own process with the same
batches, rows and initial weights. First, all must reach the same loss. Then they take turns (A B C
A B C ...), and ratios are computed within a turn.

    python benchmarks/dlrm_step.py --runs=7
    python benchmarks/dlrm_step.py --quality
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import awake
import common
import numpy as np
import summary
from absl import app, flags
from peers import Peer, Worker

_RUNS = flags.DEFINE_integer(
    "runs", 7, "Number of turns. In each turn, every variant runs --steps steps.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", 50, "Number of steps per turn.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 2048, "Examples per batch.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 2, "Number of threads of each library.", lower_bound=1)
_CARDINALITIES = flags.DEFINE_list(
    "cardinalities",
    ["100000"],
    "Rows per table: one number for all tables, or one for each of the --tables tables.",
)
_TABLES = flags.DEFINE_integer("tables", 26, "Number of embedding tables.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 16, "Values per embedding row.", lower_bound=1)
_BOTTOM = flags.DEFINE_list(
    "bottom",
    ["512", "256", "64"],
    "Layer sizes of the bottom MLP without the last layer of size --dim.",
)
_TOP = flags.DEFINE_list("top", ["512", "256"], "Layer sizes of the top MLP without the logit.")
_DENSE_OPTIMIZER = flags.DEFINE_enum(
    "dense_optimizer", "adagrad", ["adagrad", "sgd"], "Optimizer of the MLPs in all variants."
)
_WAYS = flags.DEFINE_list(
    "ways",
    ["step", "fit", "collected", "clipped", "torch", "compiled", "layers", "compiled_layers"],
    "Variants to measure in turns.",
)
_DTYPES = flags.DEFINE_list(
    "dtypes", ["float32", "mixed_bfloat16"], "Compute dtypes of the MLPs and the dot interaction."
)
_CHECKED = flags.DEFINE_integer(
    "checked",
    4,
    "Number of turns after which the losses of all variants are compared.",
    lower_bound=1,
)
_QUALITY = flags.DEFINE_bool(
    "quality",
    False,
    "Measure the test AUC in float32 and bfloat16 with slipstream-train instead of the step time.",
)
_DATA = flags.DEFINE_string(
    "data", None, "With --quality: value of --data of slipstream-train. The default is globo."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "With --quality: seeds of the runs.")
_RECORDS = flags.DEFINE_string(
    "records", "runs/dlrm_quality", "With --quality: folder of the run records."
)
_EXTRA = flags.DEFINE_multi_string(
    "train_flag", [], "With --quality: flag name=value of slipstream-train for all runs."
)
_ENVIRONMENTS = flags.DEFINE_string(
    "environments", "runs/peers", "Folder of the Python environments of the other libraries."
)

_NUMBERS, _ZIPF, _SEED = 13, 1.05, 0
_ROWS_RATE, _DENSE_RATE = 0.01, 0.01
WAYS: Mapping[str, Peer] = {
    "step": Peer("slipstream_tf, tf.function", None, ["dlrm_native.py"]),
    "fit": Peer("slipstream_tf, model.fit", None, ["dlrm_native.py", "fit"]),
    "collected": Peer(
        "slipstream_tf, model.fit, rows by the optimizer",
        None,
        ["dlrm_native.py", "fit", "collected"],
    ),
    "clipped": Peer(
        "slipstream_tf, model.fit, global_clipnorm", None, ["dlrm_native.py", "fit", "clipped"]
    ),
    "torch": Peer("PyTorch + FBGEMM", "torch", ["dlrm_fbgemm.py"]),
    "build": Peer("another build, tf.function", None, ["dlrm_native.py"], is_other_build=True),
    "compiled": Peer("PyTorch + FBGEMM, torch.compile", "torch", ["dlrm_fbgemm.py", "compiled"]),
    "layers": Peer(
        "slipstream_tf, tf.function, dense layers only", None, ["dlrm_native.py", "layers"]
    ),
    "compiled_layers": Peer(
        "PyTorch, torch.compile, dense layers only",
        "torch",
        ["dlrm_fbgemm.py", "compiled", "layers"],
    ),
}
_OURS = ("step", "fit")
# Variants that use the same rows in each step and discard their gradients. They measure a step
# without its tables.
_LAYERS = {"step": "layers", "compiled": "compiled_layers"}
# Variants in which the optimizer also receives the gradients of rows. They are compared with "fit"
# only.
_COLLECTED = ("collected", "clipped")
_DTYPE_CHOICES = ("float32", "mixed_bfloat16")
# Minimum ratio of examples per second to other libraries in float32, by our dtype.
TARGETS = {"float32": 1.15, "mixed_bfloat16": 2.0}
# Maximum ratio of a step of `fit` with a global gradient norm to a step without.
MAX_CLIPPED = 1.1
# Maximum loss of AUC in mixed_bfloat16, with --quality.
MAX_DIFFERENCE = 0.0005
# Losses are means over a turn. They differ slightly because of the order of sums and the 8 bits of
# bfloat16.
TOLERANCE = {"float32": 1e-3, "mixed_bfloat16": 5e-3}


@dataclasses.dataclass(frozen=True, order=True)
class Side:
    """A variant in a dtype, which takes turns with others."""

    dtype: str
    way: str

    @property
    def label(self) -> str:
        """The name in tables."""
        return f"{WAYS[self.way].label}, {self.dtype.removeprefix('mixed_')}"

    @property
    def is_ours(self) -> bool:
        """Whether the variant is slipstream_tf."""
        return self.way in _OURS


def make_inputs(cardinalities: Sequence[int], steps: int, batch: int) -> dict[str, np.ndarray]:
    """Draws batches with labels from a hidden model.

    Args:
        cardinalities: The number of rows of each table.
        steps: The number of batches.
        batch: The batch size.

    Returns:
        keys int64 [steps, batch, tables], dense float32 [steps, batch, 13] and labels float32
        [steps, batch].
    """
    rng = np.random.default_rng(_SEED)
    shape = (steps, batch)
    columns = [common.zipf_keys(rng, rows, shape, _ZIPF) for rows in cardinalities]
    dense = rng.normal(size=(*shape, _NUMBERS)).astype(np.float32)
    logits = dense @ rng.normal(size=_NUMBERS) / np.sqrt(_NUMBERS)
    for rows, column in zip(cardinalities, columns, strict=True):
        logits += 2.0 * rng.normal(size=rows)[column] / np.sqrt(len(cardinalities))
    labels = rng.random(shape) < 1.0 / (1.0 + np.exp(-logits))
    return {"keys": np.stack(columns, 2), "dense": dense, "labels": labels.astype(np.float32)}


def sides_agree(losses: Mapping[Side, Sequence[float]]) -> None:
    """Compares the final losses of all sides with the first side.

    Raises:
        SystemExit: If a difference exceeds the tolerance, or if a loss has not decreased.
    """
    reference = next(iter(losses), None)
    for side, found in losses.items():
        difference = found[-1] - losses[reference][-1]
        tolerance = max(TOLERANCE[side.dtype], TOLERANCE[reference.dtype])
        print(f"{side.label}: losses {' '.join(f'{loss:.5f}' for loss in found)}", flush=True)
        if len(found) > 1 and not found[-1] < found[0]:
            raise SystemExit(f"{side.label} does not learn: its losses are {found}.")
        if not abs(difference) <= tolerance:
            raise SystemExit(
                f"{side.label} ends at loss {found[-1]:.5f} and {reference.label} at loss "
                f"{losses[reference][-1]:.5f}. The difference exceeds {tolerance}, so that they do "
                "not train the same model. No results are written."
            )


def measure(
    sides: Sequence[Side], settings: Mapping[str, Any]
) -> tuple[dict[Side, list[float]], dict[str, str]]:
    """Trains all sides on the same batches, then times them in turns.

    Returns:
        The milliseconds of a step by side, for each turn, and the versions.
    """
    with contextlib.ExitStack() as stack:
        workers, versions, losses = {}, {}, {}
        calls = {side: 1 if side.way in ("fit", *_COLLECTED) else _STEPS.value for side in sides}
        for side in sides:
            print(f"{side.label} starts ...", flush=True)
            worker = Worker(WAYS[side.way], Path(_ENVIRONMENTS.value), _THREADS.value)
            workers[side] = stack.enter_context(worker)
            versions.update(worker.make({**settings, "dtype": side.dtype}))
            first = [statistics.mean(worker.losses(calls[side])) for _ in range(_CHECKED.value)]
            if side.way not in _LAYERS.values():
                losses[side] = first
        sides_agree(losses)
        found: dict[Side, list[float]] = {side: [] for side in sides}
        for _ in range(_RUNS.value):
            for side, worker in workers.items():
                found[side].append(sum(worker.run(calls[side])) / _STEPS.value)
    return found, versions


def comparisons(found: Mapping[Side, Sequence[float]]) -> dict[tuple[Side, Side], list[float]]:
    """Returns our examples per second relative to others, per turn."""
    return {
        (ours, theirs): [b / a for a, b in zip(found[ours], found[theirs], strict=True)]
        for ours in found if ours.is_ours
        for theirs in found if theirs.way not in (*_OURS, *_COLLECTED, *_LAYERS.values())
    }  # fmt: skip


def parts_of(found: Mapping[Side, Sequence[float]]) -> dict[Side, Side]:
    """Returns the sides that were also measured without tables, with those sides."""
    pairs = {side: Side(side.dtype, _LAYERS.get(side.way, "")) for side in found}
    return {side: alone for side, alone in pairs.items() if alone in found}


def tables_of(found: Mapping[Side, Sequence[float]], batch: int) -> dict[str, Any]:
    """Returns the tables of ratios and of milliseconds for each turn."""
    compared, parts = comparisons(found), parts_of(found)
    alone = [list(found[layers]) for layers in parts.values()]
    tables = [
        [whole - part for whole, part in zip(found[side], times, strict=True)]
        for side, times in zip(parts, alone, strict=True)
    ]
    rates = [[1e3 * batch / ms for ms in runs] for runs in found.values()]
    return {
        "Ratio of examples per second": [
            summary.column("slipstream_tf", [ours.label for ours, _ in compared]),
            summary.column("compared with", [theirs.label for _, theirs in compared]),
            summary.column("ratio", list(compared.values()), "{:.2f}", "median each"),
        ],
        "Libraries": [
            summary.column("library", [side.label for side in found]),
            summary.column("examples/s", rates, "{:,.0f}", "median"),
            summary.column("ms a step", list(map(list, found.values())), "{:.2f}", "median each"),
        ],
        "Parts of a step": [
            summary.column("library", [side.label for side in parts]),
            summary.column("ms in dense layers", alone, "{:.2f}", "median each"),
            summary.column("ms in tables", tables, "{:.2f}", "median each"),
        ],
    }


def claims_of(found: Mapping[Side, Sequence[float]]) -> dict[str, Any]:
    """Returns the claims: our variants in both dtypes against others in float32."""
    claims = {
        f"{'' if ours.way == 'step' else f'{ours.way}_'}{ours.dtype.removeprefix('mixed_')}_over_"
        f"{theirs.way}": summary.claim(ratios, TARGETS[ours.dtype], "higher")
        for (ours, theirs), ratios in comparisons(found).items()
        if theirs.dtype == "float32"
    }
    for side, times in found.items():
        plain = found.get(Side(side.dtype, "fit"))
        if plain is None or side.way not in _COLLECTED:
            continue
        ratios = [own / of_fit for own, of_fit in zip(times, plain, strict=True)]
        target = MAX_CLIPPED if side.way == "clipped" else None
        name = f"{side.way}_{side.dtype.removeprefix('mixed_')}_over_fit"
        claims[name] = summary.claim(ratios, target, "lower")
    for dtype in _DTYPE_CHOICES:
        # The upper bound for any table implementation: the others' complete step against our dense
        # layers.
        whole, layers = found.get(Side(dtype, "compiled")), found.get(Side(dtype, "layers"))
        if whole and layers:
            ratios = [theirs / own for theirs, own in zip(whole, layers, strict=True)]
            name = f"{dtype.removeprefix('mixed_')}_over_compiled_without_tables"
            claims[name] = summary.claim(ratios, None, "higher")
    return claims


def choose(ways: Sequence[str], dtypes: Sequence[str]) -> list[Side]:
    """Returns the sides to measure.

    Raises:
        app.UsageError: If a name is unknown.
    """
    for flag, texts, allowed in (("ways", ways, WAYS), ("dtypes", dtypes, _DTYPE_CHOICES)):
        for text in texts:
            if text not in allowed:
                raise app.UsageError(f"Invalid --{flag}: {text!r}. Expected {', '.join(allowed)}.")
    return [Side(dtype, way) for dtype in dtypes for way in ways]


def cardinalities_of(texts: Sequence[str], tables: int) -> list[int]:
    """Returns the number of rows of each table.

    Raises:
        app.UsageError: If there is neither one number nor one number per table.
    """
    rows = common.integers("cardinalities", texts)
    if len(rows) not in (1, tables) or min(rows) < 1:
        raise app.UsageError(
            f"Invalid --cardinalities={','.join(texts)}. Expected 1 or {tables} integers >= 1, "
            f"because --tables={tables}."
        )
    return rows * tables if len(rows) == 1 else rows


def compare_quality(
    data: str | None, seeds: Sequence[int], shared: Mapping[str, Any], records: Path
) -> None:
    """Compares the AUC of both dtypes for each seed, using slipstream-train.

    A run with an existing metrics.json is not repeated.

    Args:
        data: A value of slipstream-train --data. None uses globo, which is prepared first.
        seeds: The seeds of the runs.
        shared: Flags of slipstream-train for all runs.
        records: The folder of the runs.
    """
    found: dict[str, dict[int, Mapping[str, Any]]] = {dtype: {} for dtype in _DTYPE_CHOICES}
    for seed in seeds:
        opened = common.opened(data or "globo", seed)
        for dtype in _DTYPE_CHOICES:
            print(f"seed {seed}: {dtype}", flush=True)
            common_flags = {**opened, "epochs": 1, **common.by_hand(opened["data"]), **shared}
            given = {**common_flags, "seed": seed, "precision": dtype}
            record = common.train(given, records / f"seed{seed}" / dtype)
            found[dtype][seed] = record["test"]
    tables, claims = quality_of(found)
    print(summary.write("dlrm_step", "AUC in both dtypes", tables, claims))


def quality_of(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> tuple[Any, Any]:
    """Returns the table and the claim of the AUC comparison."""
    aucs = [[quality["auc"] for quality in found[dtype].values()] for dtype in _DTYPE_CHOICES]
    differences = [ours - theirs for theirs, ours in zip(*aucs, strict=True)]
    columns = [
        summary.column("seed", [str(seed) for seed in found["float32"]]),
        *(summary.column(name, v, "{:.5f}") for name, v in zip(_DTYPE_CHOICES, aucs, strict=True)),
        summary.column("difference", differences, "{:+.5f}"),
    ]
    target = -MAX_DIFFERENCE
    claim = summary.claim(differences, target, "higher", statistics.fmean)
    return {"": columns}, {"bfloat16_auc_minus_float32": claim}


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    if _QUALITY.value:
        seeds = common.integers("seeds", _SEEDS.value)
        shared = common.extra_flags(_EXTRA.value)
        compare_quality(_DATA.value, seeds, shared, Path(_RECORDS.value))
        return
    cardinalities = cardinalities_of(_CARDINALITIES.value, _TABLES.value)
    sides = choose(_WAYS.value, _DTYPES.value)
    settings: dict[str, Any] = {
        "cardinalities": cardinalities, "dim": _DIM.value, "numbers": _NUMBERS,
        "batch": _BATCH.value, "threads": _THREADS.value, "seed": _SEED,
        "bottom": [*common.integers("bottom", _BOTTOM.value), _DIM.value],
        "top": [*common.integers("top", _TOP.value), 1],
        "dense_optimizer": _DENSE_OPTIMIZER.value,
        "dense_rate": _DENSE_RATE, "rows_rate": _ROWS_RATE,
    }  # fmt: skip
    inputs = make_inputs(cardinalities, _STEPS.value, _BATCH.value)
    with tempfile.TemporaryDirectory() as scratch:
        files = {"keys": str(Path(scratch) / "keys.npy"), "inputs": str(Path(scratch) / "in.npz")}
        np.save(files["keys"], inputs.pop("keys"))
        np.savez(files["inputs"], **inputs)
        awake.keep()
        found, versions = measure(sides, {**settings, **files})
    part = f"{_TABLES.value} tables x {_CARDINALITIES.value[0]} rows x {_DIM.value}"
    tables = tables_of(found, _BATCH.value)
    print(summary.write("dlrm_step", part, tables, claims_of(found), versions))


if __name__ == "__main__":
    app.run(main)
