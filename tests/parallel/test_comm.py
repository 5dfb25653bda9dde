"""distributed.comm on several ranks, by Gloo and by MPI."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    "controller, count, is_cold", [("gloo", 2, True), ("gloo", 4, False), ("mpi", 2, True)]
)
def test_collectives(run_ranks: Any, controller: str, count: int, is_cold: bool) -> None:
    done = run_ranks("collectives.py", count, controller=controller, is_cold=is_cold)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: all equal" in done.stdout
