"""SavedModels and deltas of replicated and sharded tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_ranks_export_together(run_ranks: Any, tmp_path: Path) -> None:
    done = run_ranks("exporting.py", 2, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: exports as they should be" in done.stdout
