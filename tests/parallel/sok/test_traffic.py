"""Bytes that SOK sends are counted by kind, as it sends them."""

from __future__ import annotations

from collections.abc import Callable


def test_what_sok_sends_is_counted(run_sok: Callable[..., str]) -> None:
    run_sok("traffic.py", 2)
