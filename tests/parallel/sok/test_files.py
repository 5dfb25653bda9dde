"""SOK's own files of variables that a store watches: dumped, loaded, and what was written since."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_of_sok(run_sok: Callable[..., str], ranks: int) -> None:
    run_sok("files.py", ranks, is_keras_2=True)
