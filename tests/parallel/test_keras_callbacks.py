"""Keras's own callbacks in a `fit` on several ranks, and rows that differ when it begins."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("what", ["logs", "evaluates_alone", "checkpoint", "replicated", "sharded"])
def test_callbacks_behind_ours(run_ranks: Any, what: str) -> None:
    done = run_ranks("keras_callbacks.py", 2, what)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: as wanted" in done.stdout
    if what == "logs":
        assert "metrics ['largest'] are no sums" in done.stderr
