"""Bags that SOK pools: rows, masks and deferred sums are those of a native table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CASES = {
    1: ["mask,adam,hbm", "interval,adagrad,hybrid"],
    2: [
        "plain,sgd,hybrid",
        "mask,adagrad,hybrid",
        "interval,adagrad,hbm",
        "movement,adagrad,hybrid",
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_rows_are_those_of_a_native_table(run_sok: Callable[..., str], ranks: int) -> None:
    # Of one launch: most of its time is that of imports.
    run_sok("pooled.py", ranks, *CASES[ranks])
