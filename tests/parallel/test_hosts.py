"""Collectives between hosts work, and counted bytes match the wire."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# Maximum traffic of Horovod between idle ranks, in bytes per second.
IDLE = 2e6


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_collectives_work_across_hosts(hosts: Any) -> None:
    with hosts.Hosts(2) as network:
        ended = network.start([str(HERE / "collectives.py")]).wait(timeout=120.0)
    for rank, end in enumerate(ended):
        assert end.code == 0, end.output
        assert f"rank {rank} of 2: all equal" in end.output


@pytest.mark.parametrize("count, megabit", [(2, 200), (4, None)])
def test_counted_bytes_equal_network_bytes(hosts: Any, count: int, megabit: int | None) -> None:
    rows = 40_000
    arguments = [str(HERE / "bytes_sent.py"), hosts.COUNTERS, str(rows)]
    with hosts.Hosts(count, rate=megabit and f"{megabit}mbit") as network:
        ended = network.start(arguments).wait(timeout=240.0)
        seen_outside = [network.sent_bytes(number) for number in range(count)]
    assert [end.code for end in ended] == [0] * count, "\n".join(end.output for end in ended)
    by_rank = [json.loads(end.output.splitlines()[-1]) for end in ended]
    for collective in by_rank[0]:
        found = [rank[collective] for rank in by_rank]
        if collective == "gather_uneven":  # Exact only for all ranks together.
            found = [{key: sum(rank[key] for rank in found) for key in found[0]}]
        for one in found:
            minimum, maximum = one["counted"], 1.1 * one["counted"] + IDLE * one["seconds"]
            assert minimum <= one["kernel"] <= maximum, (collective, found)
    # In a sum, each of two ranks sends the tensor once, and each of four ranks sends it 3 / 2
    # times.
    assert by_rank[0]["sum"]["counted"] == rows * 64 * 4 * 2 * (count - 1) // count
    for total, rank in zip(seen_outside, by_rank, strict=True):
        assert total > sum(one["kernel"] for one in rank.values())
    if megabit is not None:
        assert by_rank[0]["sum"]["kernel"] * 8 / by_rank[0]["sum"]["seconds"] < 1.1e6 * megabit


def test_network_namespaces_and_processes_are_removed(hosts: Any) -> None:
    with pytest.raises(ZeroDivisionError), hosts.Hosts(2) as network:
        assert all(name in namespaces() for name in network.names)
        job = network.start(["-c", "import time; time.sleep(1e6)"])
        assert all(process.poll() is None for process in job.processes)
        _ = 1 / 0
    assert all(process.poll() is not None for process in job.processes)
    for name in network.names:
        assert name not in namespaces()
        assert not (Path("/etc/netns") / name).exists()


def test_hanging_rank_is_killed(hosts: Any) -> None:
    with hosts.Hosts(1) as network:
        job = network.start(["-c", "import time; print('here', flush=True); time.sleep(1e6)"])
        job.wait_for("here")
        with pytest.raises(TimeoutError, match="did not write 'there':\nhere"):
            job.wait_for("there", timeout=0.2)
        (end,) = job.wait(timeout=0.2)
    assert end.killed and end.code == -9 and end.output == "here\n"
