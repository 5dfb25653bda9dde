"""Checkpoints of SOK tables resume exactly and load into any store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CASES = ("sok,adagrad,mask", "sok,adam,interval", "sok,sgd,movement")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_same_number_of_ranks_continues_identically(
    run_sok: Callable[..., str], ranks: int
) -> None:
    run_sok("going_on.py", ranks, *CASES)


def test_moving_between_stores_and_ranks_keeps_all_state(
    run_sok: Callable[..., str], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    first = ("none:native:a", "a:sok:b", "b:sok_other_seed:c", "c:native:d")
    run_sok("moving.py", 1, folder, *first)
    then = ("a:sok:e", "e:sharded:f", "f:sok:g", "g:replicated:h", "h:sok_other_seed:i")
    run_sok("moving.py", 2, folder, *then)
    # Load tables of two ranks with one rank, and of one rank with two.
    run_sok("moving.py", 1, folder, "e:native:j", "g:sok:k", "i:sok_other_seed:l")
    run_sok("moving.py", 2, folder, "k:sok:m", "l:sok_other_seed:n")
