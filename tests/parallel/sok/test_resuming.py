"""Checkpoints of SOK tables resume on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_any_number_of_ranks_resumes_from_checkpoint(
    run_sok: Callable[..., str], tmp_path: Path
) -> None:
    run_sok("resuming.py", 2, str(tmp_path), "none", "whole")
    run_sok("resuming.py", 2, str(tmp_path), "whole", "again")
    run_sok("resuming.py", 1, str(tmp_path), "whole", "fewer")
    run_sok("resuming.py", 1, str(tmp_path), "none", "one")
    run_sok("resuming.py", 2, str(tmp_path), "one", "more")
