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


@pytest.mark.parametrize("ranks", ["first", "all"])
def test_a_batch_size_that_a_graph_has_as_a_constant(run_ranks: Any, ranks: str) -> None:
    """TensorFlow would run a collective of constants once, as it optimises one rank's graph."""
    done = run_ranks("constant_batches.py", 2, ranks, timeout=60.0)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank}: 20 steps" in done.stdout
