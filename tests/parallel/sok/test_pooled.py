"""Bags that SOK pools: rows, masks and deferred sums are those of a native table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# Of one launch each: most of its time is that of imports.
LAUNCHES = [
    (1, ["mask,adam,hbm", "interval,adagrad,hybrid"]),
    (2, ["plain,sgd,hybrid", "mask,adagrad,hybrid"]),
    (2, ["interval,adagrad,hbm", "movement,adagrad,hybrid"]),
]


@pytest.mark.parametrize("ranks, cases", LAUNCHES)
def test_rows_are_those_of_a_native_table(
    run_sok: Callable[..., str], ranks: int, cases: list[str]
) -> None:
    run_sok("pooled.py", ranks, *cases)
