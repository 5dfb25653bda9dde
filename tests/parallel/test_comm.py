"""distributed.comm on several ranks, by Gloo and by MPI."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("controller, count", [("gloo", 2), ("gloo", 4), ("mpi", 2)])
def test_collectives(run_ranks: Any, controller: str, count: int) -> None:
    done = run_ranks("collectives.py", count, controller=controller)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: all equal" in done.stdout
