"""What slipstream-doctor runs where SOK can be imported."""

from __future__ import annotations

from collections.abc import Callable


def test_the_self_test_of_soks_tables(run_sok: Callable[..., str]) -> None:
    run_sok("doctors_own.py", 1)
