"""Tables shared by ranks against one process: random batches, policies and rules."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    "placement, count, cases",
    [
        *(("replicated", 3, 64), ("sharded", 3, 40), ("prefetched", 2, 24)),
        pytest.param("replicated", 2, 100, marks=pytest.mark.slow),
        pytest.param("replicated", 4, 40, marks=pytest.mark.slow),
        pytest.param("sharded", 2, 60, marks=pytest.mark.slow),
        pytest.param("prefetched", 3, 16, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_process_does(
    run_ranks: Any, placement: str, count: int, cases: int
) -> None:
    done = run_ranks("random_cases.py", count, placement, str(cases), "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: {cases} cases equal" in done.stdout
