"""slipstream-train on two ranks resumes after one rank is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_programs import prepared

# The training part has 1,500 examples. Two epochs are 47 steps of the job.
INPUTS = 1_600
SMALL = (
    "--dim=4", "--mlp=8", "--bottom=8", "--dropout=0.2", "--batch_size=32", "--epochs=2",
    "--threads=1", "--window_steps=5", "--checkpoint_every=8",
)  # fmt: skip
WAYS = {
    "replicated": ("--policies=skip_examples,defer_gradients",),
    "sharded": (
        "--policies=defer_gradients", "--placement=sharded", "--capacity=70", "--eviction=lfu",
        "--evaluate_every=9",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", name="data")
def fixture_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the flag for prepared data with three keys.

    Few keys are popular.
    """
    random = np.random.default_rng(0)
    keys = random.zipf(1.3, (INPUTS, 3)) % 300
    age = random.normal(size=INPUTS).astype(np.float32)
    chance = 1 / (1 + np.exp(1 - (keys % 5 - 2).sum(axis=1) - age))
    columns = dict(zip(("user", "item", "shop"), keys.T, strict=True))
    clicked = (random.random(INPUTS) < chance).astype(np.int64)
    folder = tmp_path_factory.mktemp("data")
    table = {"clicked": clicked, "age": age, **columns}
    return f"--data={prepared(folder, table, ['user', 'item', 'shop'], ['age'])}"


def run(run_ranks: Any, output: Path, *flags: str, first: tuple[str, ...] = ()) -> Any:
    return run_ranks("train_rank.py", 2, *first, *SMALL, *flags, f"--output={output}")


def record_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "metrics.json").read_text())


def without_times(value: Any) -> Any:
    """Returns the record without times and buffer sizes.

    These depend on the process.
    """
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not k.endswith(("seconds", "deferred_bytes"))}
        return {name: without_times(part) for name, part in kept.items()}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def numbers(value: Any) -> Any:
    """Returns the value with approximate floats for comparisons."""
    if isinstance(value, dict):
        return {name: numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [numbers(part) for part in value]
    return pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize("way", [pytest.param("replicated", marks=pytest.mark.slow), "sharded"])
def test_job_resumes_after_killed_rank(run_ranks: Any, way: str, data: str, tmp_path: Path) -> None:
    flags, killed = (data, *WAYS[way]), tmp_path / "killed"
    done = run(run_ranks, tmp_path / "straight", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    # In the second epoch.
    done = run(run_ranks, killed, *flags, first=("kill-1-at", "37"))
    assert done.returncode != 0 and not (killed / "metrics.json").exists()
    assert " has lost rank 1 (127.0.0.1): its process has ended without an error message" in (
        done.stdout + done.stderr
    )
    refused = run(run_ranks, killed, *flags)
    lines = [line for line in refused.stderr.splitlines() if "slipstream-train:" in line]
    assert refused.returncode != 0 and len(lines) == 1 and "--resume" in lines[0]
    done = run(run_ranks, killed, *flags, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("training continues from") == 1
    straight, resumed = record_of(tmp_path / "straight"), record_of(killed)
    # The newest checkpoint may be incomplete, then the job resumes from the one before.
    assert resumed["resumed_at"] in ([24], [32])
    for name in (
        "test",
        "training",
        "examples",
        "rows",
        "progress",
        "evaluations",
        "gradient_rows",
    ):
        assert without_times(resumed[name]) == numbers(without_times(straight[name])), name
    assert len(resumed["windows"]) == len(straight["windows"]) > 5
    assert resumed["examples"]["seen"] == 3_000
    sent, before = resumed["ranks"]["bytes"], straight["ranks"]["bytes"]
    for kind in ("gradients", "deferred", "rows"):
        assert sent[kind] == pytest.approx(before[kind], rel=0.01), kind
    # The position in the data belongs to a rank, therefore the number of ranks must not change.
    done = run_ranks("train_rank.py", 1, *SMALL, *flags, "--resume", f"--output={killed}")
    assert done.returncode != 0
    assert "is from a job with 2 rank(s), but this job has 1" in done.stderr


@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_elastic_job_continues_with_other_ranks(
    run_ranks: Any, way: str, data: str, tmp_path: Path
) -> None:
    flags = (*SMALL, data, *WAYS[way], "--elastic", f"--output={tmp_path}")
    done = run_ranks("train_rank.py", 2, "kill-1-at", "21", *flags)
    assert done.returncode != 0 and not (tmp_path / "metrics.json").exists()
    done = run_ranks("train_rank.py", 3, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.count("--elastic: 3 rank(s) now, 2 before. Training continues from step ") == 1
    )
    record = record_of(tmp_path)
    (change,) = record["changes_of_ranks"]
    assert record["resumed_at"] == [change["step"]] and change["step"] in (8, 16)
    assert (change["ranks"], change["before"]) == (3, 2) and 0.0 < change["seconds"] < 240.0
    examples = record["examples"]
    assert examples["seen"] == 3_000 and examples["trained"] > 1_000
    assert examples["trained"] + examples["skipped"] + examples["lost"] == 3_000
    if way == "sharded":
        # Without skipping, no example waits to fill a batch.
        assert examples["lost"] == examples["skipped"] == 0
    else:
        assert examples["skipped"] > 0 and 0 <= examples["lost"] < 2 * 3 * 32
    last = record["progress"][-1]
    assert last["examples_seen"] == 3_000 and last["examples_trained"] == examples["trained"]
    assert len(record["ranks"]["bytes_by_rank"]) == 3
    # Starting a finished job again trains nothing.
    done = run_ranks("train_rank.py", 2, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
