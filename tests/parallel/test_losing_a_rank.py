"""After the loss of a rank all others end in time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# Note: all ranks must also start within this time of each other, on a busy machine too.
TIMEOUT = 12.0
# Seconds for the end of processes on a busy machine.
SLACK = 30.0
SILENT = "its host has not answered for 12 seconds"
DEAD = "its process has ended without an error message"
FAILED = "its program has failed: ValueError: no such column: price"


def lose(
    hosts: Any,
    warm: list[str],
    count: int,
    what: str,
    *meanwhile: str,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Loses the last rank and returns the end of all ranks.

    Args:
        hosts: The module hosts.py.
        warm: The `warm` fixture, so that ranks start soon after each other.
        count: Number of ranks.
        what: An event of losing.py, or "cut" to cut the rank's link.
        *meanwhile: See losing.py.
        seconds: Time limit for all other ranks to end by themselves.
        environment: Variables to set.
    """
    with hosts.Hosts(count) as network:
        program = [*warm, str(HERE / "losing.py")]
        arguments = [*program, str(TIMEOUT), "wait" if what == "cut" else what]
        job = network.start([*arguments, *meanwhile], environment)
        job.wait_for("training started")
        job.reset_clock()
        if what == "cut":
            network.cut(count - 1)
        ranks = range(count - 1 if what == "stop" else count)
        ended = job.wait(timeout=seconds + SLACK, ranks=ranks)
    for rank, end in enumerate(ended[:-1]):
        print(f"{what}, {count} ranks: rank {rank} ended after {end.seconds:.1f} s")
        assert not end.killed and end.code == 1, (rank, end.seconds, end.output)
    return ended


def loss_line(end: Any) -> str:
    """Returns the last line in which a rank reports a lost rank."""
    lines = [line for line in end.output.splitlines() if " has lost rank " in line]
    assert lines, end.output
    return lines[-1]


def loss_of(rank: int, count: int, reason: str) -> str:
    """Returns the start of a rank's message about the last rank."""
    lost = f"has lost rank {count - 1} (10.77.0.{count}): {reason}"
    return f"Rank {rank} (10.77.0.{rank + 1}) {lost}"


@pytest.mark.parametrize(
    "count, what, seconds, reason",
    [
        pytest.param(2, "raise", 0.0, FAILED, marks=pytest.mark.slow),
        (3, "raise", 0.0, FAILED),
        (2, "kill", 0.0, DEAD),
        pytest.param(3, "kill", 0.0, DEAD, marks=pytest.mark.slow),
        (2, "leave", 0.0, "its program has finished, but the program of this rank has not"),
        pytest.param(2, "cut", 1.1 * TIMEOUT + 1.0, SILENT, marks=pytest.mark.slow),
        (3, "cut", 1.1 * TIMEOUT + 1.0, SILENT),
        (3, "stop", 1.5 * TIMEOUT + 5.0, "its program did not answer within 11 seconds"),
    ],
)
def test_surviving_ranks_name_lost_rank(
    hosts: Any, warm: list[str], count: int, what: str, seconds: float, reason: str
) -> None:
    ended = lose(hosts, warm, count, what, seconds=seconds)
    for rank, end in enumerate(ended[:-1]):
        line = loss_line(end)
        assert loss_of(rank, count, reason) in line, end.output
        assert line.endswith("Start it again from its last checkpoint.")
    lost = ended[-1]
    if what == "raise":
        assert "\nValueError: no such column: price" in lost.output
    if what == "cut":  # The isolated rank has lost all other ranks.
        for rank in range(count - 1):
            assert f"rank {rank} (10.77.0.{rank + 1}): {SILENT}" in loss_line(lost)


def test_link_is_blamed_if_collectives_fail_before_probes(hosts: Any, warm: list[str]) -> None:
    gives_up = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "8"}
    ended = lose(hosts, warm, 2, "cut", seconds=TIMEOUT, environment=gives_up)
    for rank, end in enumerate(ended):
        lost = f"has lost rank {1 - rank} (10.77.0.{2 - rank}): {SILENT}"
        assert lost in loss_line(end), end.output


def test_rank_outside_collectives_is_terminated(hosts: Any, warm: list[str]) -> None:
    rank_0, _ = lose(hosts, warm, 2, "kill", "sleep", seconds=TIMEOUT)
    first, *_, last = [line for line in rank_0.output.splitlines() if "slipstream_tf:" in line]
    assert f"Rank 0 (10.77.0.1) has lost rank 1 (10.77.0.2): {DEAD}" in first
    assert last.endswith(
        "Rank 0 (10.77.0.1) is still running 12 seconds after it lost a rank, therefore it is "
        "terminated."
    )
    assert rank_0.seconds > TIMEOUT - 1.0


def test_launcher_output_names_lost_rank(run_ranks: Any) -> None:
    done = run_ranks("losing.py", 2, "30", "kill", is_cold=True)
    assert done.returncode != 0
    assert f"Rank 0 (127.0.0.1) has lost rank 1 (127.0.0.1): {DEAD}" in done.stderr + done.stdout
