"""Keys that are sent ahead: the same bits as without, whatever happens in between."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("count, cases", [(2, 8), pytest.param(3, 8, marks=pytest.mark.slow)])
def test_what_is_sent_ahead_changes_no_bit(run_ranks: Any, count: int, cases: int) -> None:
    done = run_ranks("prefetching.py", count, str(cases), "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: {cases} cases equal" in done.stdout


@pytest.mark.parametrize(
    "count, skip",
    [pytest.param(3, "none", marks=pytest.mark.slow), (2, "gradients"), (3, "defer")],
)
def test_training_ends_with_the_same_bits(run_ranks: Any, count: int, skip: str) -> None:
    done = run_ranks("fit_prefetching.py", count, skip)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: equal" in done.stdout
