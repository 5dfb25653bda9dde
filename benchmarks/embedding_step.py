"""Milliseconds of an embedding step (lookup, gradient sum, update) by library.

Shapes are 26 tables of 100,000 rows x 16 and 8 of 1,000,000 x 64, with batch 2,048 and one Zipf key
per table. Each library runs in its own process on the same keys. They take turns (A B C A B C ...),
and ratios are computed within a turn.

    python benchmarks/embedding_step.py --runs=7
    python benchmarks/embedding_step.py --shapes=26x100000x16 --peers=fbgemm --rules=adagrad
    python benchmarks/embedding_step.py --peers=fit,build,build_fit --other_build=FOLDER

Memory bandwidth is the limit: `copy` moves as many bytes as a step must (see
embedding_peers/copying.py), and `RULE_fraction_of_copy` is the fraction of its speed that our ops
reach.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import awake
import common
import numpy as np
import summary
from absl import app, flags
from peers import Peer, take_turns

from slipstream_tf import optimizers

sys.path.append(str(Path(__file__).parent / "embedding_peers"))
import rules

_RUNS = flags.DEFINE_integer(
    "runs", 7, "Number of turns. In each turn, every library runs --steps steps.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", 50, "Number of steps per turn.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 2048, "Examples per batch.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 2, "Number of threads of each library.", lower_bound=1)
_SHAPES = flags.DEFINE_list(
    "shapes",
    ["26x100000x16", "8x1000000x64"],
    "Shapes to measure: number of tables x rows per table x values per row.",
)
_RULES = flags.DEFINE_list("rules", list(rules.RULES), "Update rules to measure.")
_PEERS = flags.DEFINE_list(
    "peers",
    ["fit", "alone", "copy", "fbgemm", "tfra", "keras"],
    "Libraries to compare with the ops of slipstream_tf.",
)
_ENVIRONMENTS = flags.DEFINE_string(
    "environments", "runs/peers", "Folder of the Python environments of the other libraries."
)

_ZIPF = 1.05
_RATE = 0.01
_ALL = tuple(rules.RULES)
# Rules without extra work per step. The extra work of other rules is measured only for our ops, as
# the ratio to the plain rule.
_BARE = tuple(rule for rule in _ALL if rule not in rules.ALONE)
OURS = Peer("slipstream_tf, ops", None, ["native.py"], _ALL)
PEERS: Mapping[str, Peer] = {
    "fit": Peer("slipstream_tf, layer in model.fit", None, ["native.py", "fit"], _BARE),
    "fbgemm": Peer(
        "FBGEMM, table-batched", "torch", ["fbgemm.py"], ("sgd", "adagrad", "rowwise_adagrad")
    ),
    "tfra": Peer(
        "TFRA, dynamic embedding",
        "tfra",
        ["tfra.py"],
        ("sgd", "momentum", "adagrad", "adam", "ftrl"),
    ),
    "keras": Peer(
        "Keras 3, Embedding",
        None,
        ["keras_layers.py"],
        ("sgd", "momentum", "adagrad", "adam", "adamw", "ftrl"),
    ),
    "alone": Peer(
        "slipstream_tf, ops, update rule only", None, ["native.py", "alone"], tuple(rules.ALONE)
    ),
    "copy": Peer(
        "copy of the minimum number of bytes",
        None,
        ["copying.py"],
        _BARE,
    ),
    "build": Peer("another build, ops", None, ["native.py"], _ALL, is_other_build=True),
    "build_fit": Peer("another build, fit", None, ["native.py", "fit"], _ALL, is_other_build=True),
}
# For these peers, one call runs a whole turn.
_WHOLE = ("ops", "fit", "alone", "copy", "build", "build_fit")
# Minimum ratio of the others' time to our ops. The targets for TFRA and Keras were derived from the
# results of Adagrad.
TARGETS = {
    ("sgd", "fbgemm"): 2.0, ("adagrad", "fbgemm"): 4.0, ("rowwise_adagrad", "fbgemm"): 8.0,
    **{(rule, "tfra"): 10.0 for rule in ("sgd", "adagrad")},
    **{(rule, "tfra"): 8.0 for rule in ("momentum", "adam", "ftrl")},
    **{(rule, "keras"): 30.0 for rule in ("sgd", "adagrad")},
}  # fmt: skip
# Minimum fraction of the copy's speed by row dimension, and maximum ratio of a step with extra work
# to the plain rule.
SHARES, MAX_OVER_PEER = {16: 0.45, 64: 0.6}, 1.1


def compare(
    peers: Mapping[str, Peer], settings: Mapping[str, Any], folder: Path
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times the libraries in turns.

    Returns:
        The mean milliseconds of a step by peer, for each turn, and the versions.
    """
    steps = {name: 1 if name in _WHOLE else _STEPS.value for name in peers}
    found, versions = take_turns(peers, settings, folder, _RUNS.value, steps)
    return {name: [ms / _STEPS.value for ms in turns] for name, turns in found.items()}, versions


def table_of(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Returns the table of a shape by rule and library."""
    names = [(rule, name) for rule, by_name in found.items() for name in by_name]
    ratios = [None if name == "ops" else times_as_long(found[rule], name) for rule, name in names]
    labels = [(OURS if name == "ops" else PEERS[name]).label for _, name in names]
    every = [list(found[rule][name]) for rule, name in names]
    return [
        summary.column("rule", [rule for rule, _ in names]),
        summary.column("library", labels),
        summary.column("time / our ops", ratios, "{:.2f}", "median each"),
        summary.column("ms a step", every, "{:.2f}", "median each"),
    ]


def times_as_long(found: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Returns a library's time relative to our ops, per turn."""
    return [theirs / ours for theirs, ours in zip(found[name], found["ops"], strict=True)]


def claims_of(dim: int, found: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Returns the claims of a shape.

    The names of claims for rows of 16 have no suffix.
    """
    ending = "" if dim == 16 else f"_d{dim}"
    claims = {
        f"{_short(rule)}_over_{name}{ending}": summary.claim(
            times_as_long(by_name, name), TARGETS.get((rule, name)), "higher"
        )
        for rule, by_name in found.items()
        for name in by_name
        if name not in _WHOLE
    }
    for rule, by_name in found.items():
        if "copy" in by_name:
            shares = times_as_long(by_name, "copy")
            name = f"{_short(rule)}_fraction_of_copy_d{dim}"
            claims[name] = summary.claim(shares, SHARES.get(dim), "higher")
        if "alone" in by_name:
            ratios = [1 / ratio for ratio in times_as_long(by_name, "alone")]
            claims[f"{rule}_over_alone{ending}"] = summary.claim(ratios, MAX_OVER_PEER, "lower")
    return claims


def _short(rule: str) -> str:
    return "rowwise" if rule == "rowwise_adagrad" else rule


def read_shape(text: str) -> tuple[int, int, int]:
    """Parses TABLESxROWSxVALUES."""
    try:
        tables, rows, dim = (int(part) for part in text.split("x"))
    except ValueError:
        raise app.UsageError(
            f"Invalid --shapes: {text!r}. Expected a shape such as 26x100000x16."
        ) from None
    return tables, rows, dim


def choose(names: Sequence[str], rules: Sequence[str]) -> dict[str, dict[str, Peer]]:
    """Returns the libraries to compare for each optimizer.

    Raises:
        app.UsageError: If a name is unknown.
    """
    for flag, texts, allowed in (("peers", names, PEERS), ("rules", rules, _ALL)):
        for text in texts:
            if text not in allowed:
                raise app.UsageError(f"Invalid --{flag}: {text!r}. Expected {', '.join(allowed)}.")
    return {
        rule: {"ops": OURS, **{name: PEERS[name] for name in names if rule in PEERS[name].rules}}
        for rule in rules
    }


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    shapes = {text: read_shape(text) for text in _SHAPES.value}
    peers = choose(_PEERS.value, _RULES.value)
    folder = Path(_ENVIRONMENTS.value)
    versions: dict[str, str] = {}
    awake.keep()
    for text, (tables, rows, dim) in shapes.items():
        shape = (_STEPS.value, _BATCH.value, tables)
        keys = common.zipf_keys(np.random.default_rng(0), rows, shape, _ZIPF)
        part = f"{text}, compared with {', '.join(name for name in _PEERS.value if name != 'fit')}"
        found = {}
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "keys.npy"
            np.save(file, keys)
            for rule, chosen in peers.items():
                slots = rules.make(optimizers, rule, _RATE).slots_per_row(dim)
                settings = {"tables": tables, "rows": rows, "dim": dim, "batch": _BATCH.value,
                            "slots": slots,
                            "rule": rule, "learning_rate": _RATE, "threads": _THREADS.value,
                            "keys": str(file)}  # fmt: skip
                found[rule], reported = compare(chosen, settings, folder)
                versions.update(reported)
                # Write after each rule, so that an interrupted benchmark keeps its results.
                columns, claims = table_of(found), claims_of(dim, found)
                page = summary.write("embedding_step", part, {"": columns}, claims, versions)
                print(page, flush=True)


if __name__ == "__main__":
    app.run(main)
