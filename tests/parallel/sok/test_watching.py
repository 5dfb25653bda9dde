"""A store that watches SOK's variables: refusals, counts, masks, and HKV's eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sok_store(run_sok: Callable[..., str], ranks: int) -> None:
    run_sok("watching.py", ranks)
