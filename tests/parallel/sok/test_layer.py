"""A layer on SOK's tables: rows, masks, deferred sums and frozen copies are a native layer's."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("ranks", "mode", "rule"),
    [
        (1, "mask", "adam"),
        (2, "mask", "adagrad"),
        (2, "mask", "adam"),
        (2, "interval", "adagrad"),
        (2, "movement", "sgd"),
    ],
)
def test_rows_are_those_of_native_tables(
    run_sok: Callable[..., str], ranks: int, mode: str, rule: str
) -> None:
    run_sok("layer.py", ranks, mode, rule)
