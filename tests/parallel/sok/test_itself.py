"""SOK's own code runs here on a CPU, and does by hand calculation what this package relies on."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("ranks", [1, 2])
def test_sok_does_what_is_built_on(run_sok: Callable[..., str], ranks: int) -> None:
    run_sok("itself.py", ranks, is_keras_2=True)
