"""A layer on SOK's tables: rows, masks, deferred sums and frozen copies are a native layer's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CASES = {1: ["mask,adam"], 2: ["mask,adagrad", "mask,adam", "interval,adagrad", "movement,sgd"]}


@pytest.mark.parametrize("ranks", CASES)
def test_rows_are_those_of_native_tables(run_sok: Callable[..., str], ranks: int) -> None:
    # Of one launch: most of its time is that of imports.
    run_sok("layer.py", ranks, *CASES[ranks])
