"""Ranks whose settings or rows differ are told so, all of them, and none waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

MESSAGES = {
    "tables": "ValueError: Invalid settings of an embedding store on rank 1: tables[1].dim is 5, "
    "but on rank 0 4. Allowed: the same settings on all ranks.",
    "config": "ValueError: Invalid settings of Slipstream on rank 1: snapshot_interval is 20, but "
    "on rank 0 10. Allowed: the same settings on all ranks.",
    "rows": "DivergenceError: Window 3: the saturated keys or T of rank(s) 1 differ from those of "
    "rank 0",
}


@pytest.mark.parametrize("placement", [""])
@pytest.mark.parametrize("what, count", [("tables", 3), ("config", 2), ("rows", 3)])
def test_every_rank_is_told(run_ranks: Any, placement: str, what: str, count: int) -> None:
    done = run_ranks("disagreements.py", count, what, placement, timeout=240.0)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank}: {MESSAGES[what]}" in done.stdout
