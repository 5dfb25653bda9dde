"""A job lost in the middle resumes from its last complete checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
PROGRAM = "resuming.py"
# As in the program. A rank on an isolated host is named after at most 1.1 times this time plus a
# second.
TIMEOUT = 12.0
# Seconds for the end of processes on a busy machine.
SLACK = 30.0
ENOUGH = 240.0


def require_same(lost: Path, never_lost: Path) -> None:
    """Asserts that every rank has bitwise the same final state.

    Compares rows, slots, weights and the optimizer.
    """
    for rank in range(2):
        with np.load(lost / f"rank{rank}.npz") as one, np.load(never_lost / f"rank{rank}.npz") as b:
            assert set(one) == set(b) and len(one["f0_keys"]) > 50
            for name in one:
                np.testing.assert_array_equal(one[name], b[name], err_msg=f"rank {rank}: {name}")


def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Makes result folders for a lost and an uninterrupted job."""
    found = tmp_path / "lost", tmp_path / "never_lost"
    for folder in found:
        folder.mkdir()
    return found


def test_job_resumes_after_cut_link(hosts: Any, warm: list[str], tmp_path: Path) -> None:
    lost, never_lost = folders(tmp_path)
    program, saved = [*warm, str(HERE / PROGRAM)], tmp_path / "checkpoints"
    with hosts.Hosts(2) as network:
        job = network.start([*program, str(saved), str(lost), "replicated", "crawl"])
        job.wait_for("saved step 10", ENOUGH)
        job.reset_clock()
        network.cut(1)
        ended = job.wait(1.1 * TIMEOUT + 1.0 + SLACK)
    for rank, end in enumerate(ended):
        print(f"cut: rank {rank} ended after {end.seconds:.1f} s")
        assert not end.killed and end.code == 1, (rank, end.seconds, end.output)
        peer = 1 - rank
        assert (
            f"Rank {rank} (10.77.0.{rank + 1}) has lost rank {peer} (10.77.0.{peer + 1}): its host "
            "has not answered for 12 seconds" in end.output
        ), end.output
        assert f"rank {rank} of 2: trained" not in end.output
    newest = sorted(saved.glob("checkpoint-*"))[-1]
    step = json.loads((newest / "manifest.json").read_text())["step"]
    assert 10 <= step < 30

    with hosts.Hosts(2) as network:
        again = network.start([*program, str(saved), str(lost), "replicated", "train"])
        for end in again.wait(ENOUGH):
            assert end.code == 0, end.output
            assert f"starts at step {step} of {newest}\n" in end.output, end.output
        other = [str(tmp_path / "others"), str(never_lost), "replicated", "train"]
        for end in network.start([*program, *other]).wait(ENOUGH):
            assert end.code == 0, end.output
            assert "starts at step 0 of None\n" in end.output
    require_same(lost, never_lost)


def test_job_resumes_after_rank_killed_during_save(run_ranks: Any, tmp_path: Path) -> None:
    lost, never_lost = folders(tmp_path)
    saved = tmp_path / "checkpoints"
    done = run_ranks(PROGRAM, 2, str(saved), str(lost), "sharded", "die")
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "Rank 0 (127.0.0.1) has lost rank 1 (127.0.0.1): its process has ended" in output
    assert sorted(path.name for path in saved.iterdir()) == [
        ".saving",
        "checkpoint-000001",
        "checkpoint-000002",
    ]

    # One rank, or three ranks together, have the same rows.
    rows = {}
    for ranks in (1, 3):
        results = tmp_path / f"of_{ranks}"
        results.mkdir()
        done = run_ranks(PROGRAM, ranks, str(saved), str(results), "sharded", "load")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(f"starts at step 10 of {saved / 'checkpoint-000002'}") == ranks
        parts = [dict(np.load(results / f"rank{rank}.npz")) for rank in range(ranks)]
        order = np.argsort(np.concatenate([part["f0_keys"] for part in parts]))
        rows[ranks] = {
            name: np.concatenate([part[name] for part in parts])[order]
            for name in ("f0_keys", "f0_rows", "f0_slots")
        }
    for name, values in rows[1].items():
        assert len(values) > 50
        np.testing.assert_array_equal(values, rows[3][name], err_msg=name)

    done = run_ranks(PROGRAM, 2, str(saved), str(lost), "sharded", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"starts at step 10 of {saved / 'checkpoint-000002'}") == 2
    done = run_ranks(PROGRAM, 2, str(tmp_path / "others"), str(never_lost), "sharded", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    require_same(lost, never_lost)
