"""Checks that two builds of the package train to the same bits.

Run it before and after a refactoring.

    python tests/same_bits.py --old=FOLDER --new=FOLDER

Each folder holds the package with its op library: a source tree after `python setup.py build_ext
--inplace`, or the result of `pip install --target=FOLDER .`. Each build

- prepares a generated click log with `slipstream-prepare`,
- trains with `slipstream-train` on that log and on `generated` examples, in one process and on two
  ranks with replicated and with sharded tables, in all MODES, and
- trains a small Keras model with `fit`, once per optimizer of the rows.

Every run ends with an exported SavedModel. The embedding rows are compared by key, the dense
weights in order, and the counts and thresholds of metrics.json by name. The exit code is 1 if a bit
differs.

The builds may have different versions of the command line and the API. DIALECTS contains the flags
and names for the same training in each version. Finished runs in `--work` are not repeated, so that
the old build trains once.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Flags for the same training in every version, by mode.
MODES: dict[str, list[str]] = {
    "none": ["--watch"],
    "mask": ["--policies=mask_gradients"],
    "defer": ["--policies=defer_gradients"],
    "predicted_loss": ["--policies=skip_examples"],
    "row_drift": ["--policies=skip_examples", "--skip_score=row_drift"],
    "both": ["--policies=skip_examples,defer_gradients", "--skip_score=row_drift"],
    "random": ["--control=random"],
    # More than 256 gradient rows of a key (kRowsPerChunk) are summed in chunks. Version 0.2 has no
    # chunks, therefore the bits of this mode differ from it.
    "large_batch": ["--policies=mask_gradients", "--batch_size=2048", "--window_steps=4"],
}


@dataclasses.dataclass(frozen=True)
class Dialect:
    """Differences of one package version in its command line, files and API.

    Attributes:
        flags: Mode -> flags in addition to the flags in MODES.
        renamed_flags: Name in MODES or SIZES -> name in this version.
        renamed_metrics: Path in METRICS -> path in metrics.json of this version.
    """

    flags: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    renamed_flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed_metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)


# Key: the first two numbers of the version. Version 0.2 has hysteresis, and release=1 disables it.
# Version 0.3 shuffles by default.
DIALECTS = {
    "0.2": Dialect(
        flags={mode: ("--release=1",) for mode in ("none", "mask", "row_drift", "both")},
        renamed_flags={"--skip_score": "--skip_by"},
    ),
    "0.3": Dialect(flags={mode: ("--shuffle=none",) for mode in MODES}),
}
PLACEMENTS: dict[str, list[str]] = {
    "native": [],
    "replicated": ["--placement=replicated"],
    "sharded": ["--placement=sharded"],
}
RANKS = 2
# With 256 examples per batch, sums of gradients by key have one chunk, see `large_batch`.
SIZES = [
    "--max_examples=40000", "--batch_size=256", "--window_steps=8", "--threads=1",
    # These are defaults of older builds.
    "--model=dlrm", "--rows_learning_rate=0.05",
]  # fmt: skip
CLICKS, SCHEMA = 40_000, {
    "label": "clicked",
    "keys": ["user", "item", "category"],
    "dense": ["price"],
}  # fmt: skip
# Paths of metrics.json that must be equal; `*` stands for a name or an index.
METRICS = (
    "test.auc",
    "test.log_loss",
    "examples.trained",
    "examples.skipped",
    "row_lookups",
    *(f"gradient_rows.*.{name}" for name in ("offered", "sent", "masked", "deferred")),
    *(f"windows.*.{name}" for name in ("step", "threshold", "hot_keys", "saturated_keys")),
)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "rowwise_adam", "ftrl")


class Build:
    """One build of the package and the folder of its runs."""

    def __init__(self, folder: Path, work: Path):
        self.runs, self._folder = work, folder.resolve()
        version = (folder / "slipstream_tf" / "_version.py").read_text()
        found = re.search(r'"(\d+\.\d+)', version)
        if found is None or found[1] not in DIALECTS:
            raise SystemExit(
                f"Unknown version of {folder}: {version.strip()}. Expected one of "
                f"{', '.join(DIALECTS)}. Add the version to DIALECTS."
            )
        self.dialect = DIALECTS[found[1]]
        self._environment = {
            **os.environ, "PYTHONPATH": str(self._folder), "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip

    def run(self, output: Path, *arguments: str, ranks: int = 1) -> None:
        """Runs Python with an empty output folder, unless already finished.

        Raises:
            SystemExit: The program failed. The message contains its output.
        """
        if (output / "done").exists():
            return
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        launcher = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks)]
        command = [*(launcher if ranks > 1 else []), sys.executable, *arguments]
        # `python -m` would prefer a package in the current folder over PYTHONPATH.
        done = subprocess.run(
            command, env=self._environment, cwd=self._folder, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        (output / "done").write_text("")

    def prepared(self, log: Path) -> str:
        """Prepares the click log and returns the prepared folder."""
        output = self.runs / "prepared"
        schema = log.with_suffix(".json")
        self.run(output, "-m", "slipstream_tf.cli.prepare", str(log), f"--schema={schema}",
                 f"--output={output}")  # fmt: skip
        return str(output)

    def train(self, case: str, data: str, placement: str, mode: str) -> Path:
        """Trains one case and returns its folder."""
        output = self.runs / case
        flags = [f"--data={data}", *SIZES, *PLACEMENTS[placement], *MODES[mode]]
        flags += self.dialect.flags.get(mode, [])
        flags += [f"--output={output}", f"--export={output / 'export'}"]
        if mode == "random":
            flags.append(f"--match={output.parent / 'row_drift' / 'metrics.json'}")
        named = re.compile("|".join(map(re.escape, self.dialect.renamed_flags)) or "$^")
        flags = [named.sub(lambda m: self.dialect.renamed_flags[m[0]], flag) for flag in flags]
        ranks = 1 if placement == "native" else RANKS
        self.run(output, "-m", "slipstream_tf.cli.train", *flags, ranks=ranks)
        return output

    def fit(self, optimizer: str) -> Path:
        """Trains the Keras model and returns the folder of its export."""
        output = self.runs / "fit" / optimizer
        self.run(output, __file__, f"--fit={optimizer}", f"--work={output}")
        return output

    def metrics(self, folder: Path) -> dict[str, Any]:
        """Returns the values of METRICS by their path in the oldest version."""
        leaves = dict(_leaves(json.loads((folder / "metrics.json").read_text())))
        found = {}
        for path in METRICS:
            own = self.dialect.renamed_metrics.get(path, path)
            matches = fnmatch.filter(leaves, own)
            found |= {f"{path} #{i}": leaves[match] for i, match in enumerate(matches)}
        return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and value of every leaf of a JSON value."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in items:
            yield from _leaves(part, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def write_log(path: Path) -> None:
    """Writes a click log and its schema, from a fixed seed.

    The log has skewed keys and a price.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    users, items = (np.minimum(random.zipf(1.3, CLICKS), 20_000) for _ in range(2))
    taste = random.normal(size=20_001)
    prices = random.gamma(2.0, 1.0, CLICKS)
    logit = taste[users] + taste[items] - 0.3 * prices - 0.5
    clicked = random.random(CLICKS) < 1 / (1 + np.exp(-logit))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("clicked", "user", "item", "category", "price"))
        for values in zip(clicked.astype(int), users, items, items % 50, prices, strict=True):
            writer.writerow((*values[:4], f"{values[4]:.3f}"))
    path.with_suffix(".json").write_text(json.dumps(SCHEMA))


def fit(optimizer: str, output: Path) -> None:
    """Trains a Keras model around an embedding layer and exports it.

    Runs inside a build.
    """
    import keras
    import tensorflow as tf

    import slipstream_tf as slip

    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(1)
    keys = np.minimum(random.zipf(1.3, (8192, 4)), 5_000).astype(np.int64)
    labels = (random.random(8192) < 0.3).astype(np.float32)
    inputs = keras.Input((4,), dtype="int64")
    rows = slip.keras.Embedding(None, 8, optimizer=optimizer, name="rows")(inputs)
    outputs = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(rows))
    model = slip.keras.Model(inputs, outputs)
    model.compile(optimizer="adam", loss="binary_crossentropy")
    model.fit(keys, labels, batch_size=256, epochs=2, shuffle=False, verbose=0)
    slip.export.saved_model(model, str(output / "export"))


def exported(folder: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an exported SavedModel.

    Embedding rows are in the order of their keys.
    """
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / "export" / "variables" / "variables"))
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    names = [n for n in reader.get_variable_to_shape_map() if n.endswith(suffix)]
    found = {name.removesuffix(suffix): np.asarray(reader.get_tensor(name)) for name in names}
    for name in [name for name in found if re.fullmatch(r"tables/\d+/keys", name)]:
        order = np.argsort(found[name])
        found[name] = found[name][order]
        rows = name.removesuffix("keys") + "rows"
        # The first row is the row of absent keys.
        found[rows] = found[rows][np.concatenate([[0], order + 1])]
    return found


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns a line per name with values that differ in any bit."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            found.append(f"{name} is only in the {'old' if name in before else 'new'} build")
            continue
        one, other = np.asarray(before[name]), np.asarray(after[name])
        if one.dtype != other.dtype or one.shape != other.shape:
            found.append(f"{name}: {one.dtype}{one.shape} became {other.dtype}{other.shape}")
        elif one.dtype == object:
            if before[name] != after[name]:
                found.append(f"{name}: {before[name]!r} became {after[name]!r}")
        elif one.tobytes() != other.tobytes():
            found.append(f"{name} differs in {np.count_nonzero(one != other)} of {one.size} values")
    return found


def compare(old: Build, new: Build, case: str, run: Callable[[Build], Path]) -> bool:
    """Compares a case in both builds, prints and returns the verdict.

    True means that all bits are equal.
    """
    folders = [run(build) for build in (old, new)]
    arrays, after = map(exported, folders)
    found = differences(arrays, after)
    if (folders[0] / "metrics.json").exists():
        found += differences(*(b.metrics(f) for b, f in zip((old, new), folders, strict=True)))
    values = sum(array.size for array in arrays.values())
    verdict = "; ".join(found[:5]) if found else "the same bits"
    print(f"{case}: {len(arrays)} arrays, {values:,} values: {verdict}", flush=True)
    return not found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--old", type=Path, help="folder of the earlier build")
    parser.add_argument("--new", type=Path, help="folder of the later build")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/same_bits"), help="folder of the runs"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="modes, separated by commas")
    parser.add_argument(
        "--placements", default=",".join(PLACEMENTS), help="placements, separated by commas"
    )
    parser.add_argument("--train_only", action="store_true", help="train only the old build")
    parser.add_argument("--fit", help=argparse.SUPPRESS)  # Used only inside a build.
    options = parser.parse_args()
    work = options.work.resolve()
    if options.fit:
        return fit(options.fit, work)
    if options.old is None or options.new is None:
        parser.error("--old and --new are required")
    old, new = (Build(getattr(options, side), work / side) for side in ("old", "new"))
    log = work / "clicks.csv"
    write_log(log)
    cases: list[tuple[str, Callable[[Build], Path]]] = [
        (f"fit/{optimizer}", lambda build, o=optimizer: build.fit(o)) for optimizer in OPTIMIZERS
    ]
    for data in ("prepared", "generated:40000"):
        for placement in options.placements.split(","):
            for mode in options.modes.split(","):
                case = f"{data.partition(':')[0]}-{placement}/{mode}"

                def run(build: Build, case=case, data=data, place=placement, mode=mode) -> Path:
                    source = build.prepared(log) if data == "prepared" else data
                    return build.train(case, source, place, mode)

                cases.append((case, run))
    if options.train_only:
        for _, run in cases:
            run(old)
        return None
    results = [compare(old, new, case, run) for case, run in cases]
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
