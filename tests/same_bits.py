"""Whether two builds of the package train to the same bits. To be run around a refactoring.

    python tests/same_bits.py --old=FOLDER --new=FOLDER --data=globo_clicks.npz

Both folders hold the package with its op library: a source tree after `python setup.py build_ext
--inplace`, or what `pip install --target=FOLDER .` made. Each build trains by `slipstream-train` on
the given data and on generated data, in one process and in two ranks, with replicated and with
sharded tables, in eight modes. The last checkpoints are compared array by array: rows, slots,
access counts, states, deferred gradients, thresholds, dense weights. Ends with 1 if a bit differs.

Runs that are in `--work` already are not repeated, so the old build trains once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MODES: dict[str, list[str]] = {
    "none": ["--watch"],
    "mask": ["--policies=mask_gradients"],
    "defer": ["--policies=defer_gradients"],
    "row_drift": ["--policies=skip_examples", "--skip_by=row_drift"],
    "both": ["--policies=skip_examples,defer_gradients", "--skip_by=row_drift"],
    "cache": ["--policies=mask_gradients,cache_rows"],  # Of sharded tables only.
    "random": ["--control=random"],
}
PLACEMENTS: dict[str, list[str]] = {
    "native": [],
    "replicated": ["--placement=replicated"],
    "sharded": ["--placement=sharded"],
}
RANKS = 2
SIZES = ["--max_examples=40000", "--batch_size=256", "--window_steps=8", "--threads=1"]
MEASURED = ("test", "inputs", "row_lookups", "gradient_rows", "windows")
# The rate of the last update, which sharded tables once saved as 0, is for deferred gradients only.
UNMEASURED = ("second", "bytes", "traffic", "learning_rate")
_PREFIX = struct.Struct("<8sII")
_CRC_BYTES = 4


def timeless(value: Any) -> Any:
    """Returns JSON values without what a refactoring may change: times and bytes among them."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not any(w in k for w in UNMEASURED)}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def arrays_of(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a file of `slipstream_tf.checkpoint.array_file`, named by group."""
    data = path.read_bytes()
    _, header_bytes, _ = _PREFIX.unpack_from(data)
    at = _PREFIX.size + header_bytes
    header = json.loads(data[_PREFIX.size : at])
    for group in header["groups"]:
        parts: dict[str, list[np.ndarray]] = {name: [] for name, _, _ in group["columns"]}
        left = group["rows"]
        while left:
            rows = min(left, header["block_rows"])
            for name, dtype, shape in group["columns"]:
                count = rows * int(np.prod(shape, dtype=np.int64))
                parts[name].append(np.frombuffer(data, dtype, count, at).reshape(rows, *shape))
                at += count * np.dtype(dtype).itemsize
            at += _CRC_BYTES
            left -= rows
        for name, found in parts.items():
            yield f"{group['name']}.{name}", np.concatenate(found) if found else np.zeros(0)
    yield "meta", np.array(json.dumps(timeless(header["meta"]), sort_keys=True))


def contents_of(checkpoint: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a checkpoint by rank, file and name."""
    import tensorflow as tf

    found: dict[str, np.ndarray] = {}
    for path in sorted(checkpoint.glob("rank-*/*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.suffix == ".index":
            reader = tf.train.load_checkpoint(str(path.with_suffix("")))
            for variable, dtype in reader.get_variable_to_dtype_map().items():
                if dtype.is_floating or dtype.is_integer:
                    found[f"{name}:{variable}"] = np.asarray(reader.get_tensor(variable))
        elif ".data-" not in path.name:
            found |= {f"{name}:{array}": value for array, value in arrays_of(path)}
    return found


def train(build: Path, output: Path, data: str, placement: str, mode: str) -> None:
    """Trains one case with a build into an empty folder, unless it has been trained."""
    if (output / "done").exists():
        return
    shutil.rmtree(output, ignore_errors=True)
    program = [sys.executable, "-m", "slipstream_tf.cli.train"]
    flags = [f"--data={data}", *SIZES, *PLACEMENTS[placement], *MODES[mode]]
    flags += [f"--output={output}", "--checkpoint_every=20", "--keep_checkpoints=1"]
    if mode == "random":
        flags.append(f"--match={output.parent / 'row_drift' / 'metrics.json'}")
    if placement != "native":
        launcher = str(Path(sys.executable).parent / "horovodrun")
        program = [launcher, "-np", str(RANKS), *program]
    environment = {**os.environ, "PYTHONPATH": str(build), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [*program, *flags], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join([*program, *flags])}\n{done.stdout}\n{done.stderr}")
    (output / "done").write_text("")


def differences(old: Path, new: Path) -> tuple[int, int, list[str]]:
    """Returns how many arrays and values were compared, and what differs, a line each."""
    before, after = (contents_of(max((f / "checkpoints").glob("checkpoint-*"))) for f in (old, new))
    found, values = [], 0
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            found.append(f"{name} is only in {'the old' if name in before else 'the new'} build")
            continue
        one, other = before[name], after[name]
        values += one.size
        if one.dtype != other.dtype or one.shape != other.shape:
            found.append(f"{name} has another type or shape")
        elif one.tobytes() != other.tobytes():
            found.append(f"{name} differs in {np.count_nonzero(one != other)} values")
    return len(before), values, found


def metrics_of(folder: Path) -> Any:
    """Returns what a run measured, but for times and bytes."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return timeless({name: metrics[name] for name in MEASURED})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--old", type=Path, required=True, help="folder of the build before")
    parser.add_argument("--new", type=Path, required=True, help="folder of the build after")
    parser.add_argument("--data", default="", help="globo_clicks.npz; without it generated only")
    parser.add_argument("--work", type=Path, default=Path("runs/same_bits"), help="folder of runs")
    parser.add_argument("--modes", default=",".join(MODES), help="names joined by ','")
    parser.add_argument("--train_only", action="store_true", help="train the old build, no more")
    options = parser.parse_args()
    wrong = 0
    for data in [*([options.data] if options.data else []), "generated:40000"]:
        for placement in PLACEMENTS:
            for mode in options.modes.split(","):
                if mode == "cache" and placement != "sharded":
                    continue
                case = Path(Path(data.partition(":")[0]).stem) / placement / mode
                old, new = (options.work.resolve() / side / case for side in ("old", "new"))
                train(options.old.resolve(), old, data, placement, mode)
                if options.train_only:
                    continue
                train(options.new.resolve(), new, data, placement, mode)
                arrays, values, found = differences(old, new)
                if metrics_of(old) != metrics_of(new):
                    found.append(f"{new}/metrics.json has other numbers")
                wrong += bool(found)
                verdict = "; ".join(found[:5]) if found else "the same bits"
                print(f"{case}: {arrays} arrays, {values:,} values: {verdict}", flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
