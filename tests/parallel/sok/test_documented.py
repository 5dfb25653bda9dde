"""What docs/sok.md says: its blocks run, and SOK has the traps that it lists."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_blocks_run(run_sok: Callable[..., str], ranks: int) -> None:
    run_sok("documented.py", ranks)


@pytest.mark.parametrize("is_keras_2", [False, True])
def test_traps_are_there(run_sok: Callable[..., str], is_keras_2: bool) -> None:
    run_sok("traps.py", 1, is_keras_2=is_keras_2)
