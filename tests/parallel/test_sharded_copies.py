"""Copies of rows that other ranks own: their memory, and what travels with them."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("count", [2, 3])
def test_copies_stay_in_their_budget_and_travel_lean(run_ranks: Any, count: int) -> None:
    done = run_ranks("sharded_copies.py", count)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: copies as they should be" in done.stdout
