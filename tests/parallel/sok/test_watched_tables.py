"""Checkpoints of a loop that a SokStore watches: it goes on bitwise; native tables read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CASES = {
    1: ("Adam,mask", "Adagrad,interval", "Momentum,interval", "sok.SGD,movement"),
    2: ("Adam,interval", "Adagrad,movement", "static,interval"),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_watched_loop_goes_on(run_sok: Callable[..., str], ranks: int) -> None:
    run_sok("watched_tables.py", ranks, *CASES[ranks])


def test_a_watched_loop_with_optimizers_of_keras_2_goes_on(run_sok: Callable[..., str]) -> None:
    run_sok("watched_tables.py", 1, "legacy.Adam,mask", "legacy.Adagrad,movement", is_keras_2=True)
