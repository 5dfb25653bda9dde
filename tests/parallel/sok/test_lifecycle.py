"""Tables of SOK in a model: refusals, `fit`, `evaluate`, and their state saved and loaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_model_on_soks_tables(run_sok: Callable[..., str], ranks: int) -> None:
    run_sok("lifecycle.py", ranks)
