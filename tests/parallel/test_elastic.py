"""A job whose ranks are killed, silenced, taken away and brought back ends with all examples."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# 20 ran once: SEQUENCES=20, and EVENTS=4.
SEQUENCES = int(os.environ.get("SEQUENCES", "1"))
EVENTS = int(os.environ.get("EVENTS", "2"))
EXAMPLES = 600_000 + 500_000 * EVENTS
# Seconds until training goes on, on a busy machine, too.
WITHIN = {"kill": 60.0, "kill agent": 60.0, "silence": 90.0, "join": 90.0, "leave": 90.0}
WAYS = {
    "replicated": ["--placement=replicated"],
    "sharded": ["--placement=sharded", "--policies=skip_examples,defer_gradients", "--warmup=0.05"],
}
_GOES_ON = "Goes on from step"


class Sequence:
    """Random events on a cluster, one after the other.

    Args:
        cluster: of hosts 1 to 4.
        seed: of the choice.
        commits: folder of the job's checkpoints.
    """

    def __init__(self, cluster: Any, seed: int, commits: Path) -> None:
        self._cluster, self._random, self._commits = cluster, random.Random(seed), commits
        self.took: list[tuple[str, int, float]] = []

    def event(self) -> None:
        """Makes one happen, and waits until training has gone on and saved something."""
        cluster, up = self._cluster, sorted(self._cluster.up)
        self._wait_for_commit()
        possible = ["kill", "kill agent"]
        if len(up) > 2:
            possible += ["silence", "leave"]
        if len(up) < 4:
            possible += ["join"] * 2
        what = self._random.choice(possible)
        host = self._random.choice(up)
        since = time.monotonic()
        if what in ("kill", "kill agent"):
            cluster.kill(host, agent=what == "kill agent")
        elif what == "silence":
            cluster.silence(host)
            # Who asks the hosts whether they are there gives them some time.
            time.sleep(5.0)
            cluster.set_up([other for other in up if other != host])
        elif what == "leave":
            cluster.set_up([other for other in up if other != host])
        else:
            host = min({1, 2, 3, 4} - set(up))
            cluster.mend(host)
            cluster.set_up([*up, host])
        seconds = cluster.wait_for(_GOES_ON, WITHIN[what], since)
        self.took.append((what, len(cluster.up), seconds))

    def _wait_for_commit(self) -> None:
        newest, deadline = self._newest(), time.monotonic() + 60.0
        while self._newest() == newest:
            if time.monotonic() > deadline or not self._cluster.is_running:
                raise TimeoutError(f"Nothing new is saved:\n{self._cluster.output()}")
            time.sleep(0.05)

    def _newest(self) -> str:
        return max((path.name for path in self._commits.glob("checkpoint-*")), default="")


@pytest.mark.parametrize("number", range(SEQUENCES))
def test_every_example_is_trained_skipped_or_lost(
    hosts: Any, elastic_cluster: Any, tmp_path: Path, number: int
) -> None:
    way = list(WAYS)[number % 2]
    output = tmp_path / "run"
    train = [
        sys.executable, "-m", "slipstream_tf.cli.train", "--elastic", f"--output={output}",
        f"--data=generated:{EXAMPLES}", "--checkpoint_every=75", "--batch_size=512", "--dim=8",
        "--bottom=32", "--mlp=32", *WAYS[way],
    ]  # fmt: skip
    with hosts.Hosts(5) as network:
        cluster = elastic_cluster.ElasticCluster(network, tmp_path, up=[1, 2])
        try:
            cluster.start(train, most=4)
            sequence = Sequence(cluster, number, output / "checkpoints")
            for _ in range(EVENTS):
                sequence.event()
            code = cluster.wait(240.0)
            assert code == 0, cluster.output()
        finally:
            cluster.close()
    for what, ranks, seconds in sequence.took:
        print(f"sequence {number}, {way}: {what}, {ranks} host(s) then: {seconds:.1f} s")
    record = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    examples = record["examples"]
    print(f"sequence {number}: {examples}, AUC {record['test']['auc']:.4f}")
    assert examples["seen"] == EXAMPLES
    assert examples["trained"] + examples["skipped"] + examples["lost"] == EXAMPLES
    # In batches that were not full, or waited to be trained, at each change.
    assert examples["lost"] <= (len(record["changes_of_ranks"]) * 4 * 4 * 512)
    assert examples["lost"] == 0 or way == "sharded"
    assert record["test"]["auc"] > 0.7


def steps_of(folder: Path, ranks: int) -> dict[int, list[int]]:
    """Returns the batches that ranks have noted, by step."""
    found: dict[int, list[int]] = {}
    for path in folder.glob(f"size-{ranks}-rank-*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            step, batch = json.loads(line)
            found.setdefault(step, []).append(batch)
    return found


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_other_ranks_train_what_is_left(run_ranks: Any, tmp_path: Path, placement: str) -> None:
    # 2 ranks of 40 batches end after step 9; step 8 is saved. 3 ranks have 24 batches left.
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
