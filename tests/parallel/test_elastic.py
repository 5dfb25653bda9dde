"""An elastic job with failing and joining ranks accounts for all examples."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

SEQUENCES = int(os.environ.get("SEQUENCES", "1"))
EVENTS = int(os.environ.get("EVENTS", "2"))
# On a busy machine an event takes long, compared with training. Later events may have four ranks.
EXAMPLES = 900_000 + 500_000 * max(0, EVENTS - 2)
# Four ranks that train 512 examples per step store at least one more checkpoint, every 75 steps.
LAST = EXAMPLES // (4 * 512 * 75) - 1


@pytest.mark.parametrize("number", range(SEQUENCES))
def test_every_example_is_trained_skipped_or_lost_in_failure(
    hosts: Any, elastic_cluster: Any, tmp_path: Path, number: int
) -> None:
    way = list(elastic_cluster.WAYS)[number % 2]
    train = [
        sys.executable, "-m", "slipstream_tf.cli.train", f"--data=generated:{EXAMPLES}",
        *elastic_cluster.SMALL, *elastic_cluster.WAYS[way],
    ]  # fmt: skip
    took, record = elastic_cluster.disturb(hosts, tmp_path, train, number, EVENTS, LAST)
    for event in took:
        print(f"sequence {number}, {way}: {event}")
    examples = record["examples"]
    print(f"sequence {number}: {examples}, AUC {record['test']['auc']:.4f}")
    assert examples["seen"] == EXAMPLES
    assert examples["trained"] + examples["skipped"] + examples["lost"] == EXAMPLES
    # At each change, examples are lost in partial batches and in batches that wait for training.
    assert examples["lost"] <= (len(record["changes_of_ranks"]) * 4 * 4 * 512)
    assert examples["lost"] == 0 or way == "sharded"
    assert record["test"]["auc"] > 0.7


def steps_of(folder: Path, ranks: int) -> dict[int, list[int]]:
    """Returns step -> batches that the ranks recorded."""
    found: dict[int, list[int]] = {}
    for path in folder.glob(f"size-{ranks}-rank-*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            step, batch = json.loads(line)
            found.setdefault(step, []).append(batch)
    return found


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_new_ranks_train_remaining_examples(run_ranks: Any, tmp_path: Path, placement: str) -> None:
    # With 2 ranks, the 40 batches end after step 9, and step 8 is saved. 24 batches are left for 3
    # ranks.
    done = run_ranks("elastic_program.py", 2, str(tmp_path), "9", placement)
    assert done.returncode != 0, done.stdout
    done = run_ranks("elastic_program.py", 3, str(tmp_path), "0", placement)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 2 of 3: from 8" in done.stdout
    first, second = steps_of(tmp_path, 2), steps_of(tmp_path, 3)
    assert min(second) == 9 and max(second) == 16
    trained = [batch for step in range(1, 9) for batch in first[step]]
    trained += [batch for step in second for batch in second[step]]
    assert sorted(trained) == list(range(40))
