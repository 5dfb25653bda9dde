"""Three calls in a loop of SOK's own: the engine masks what it masks in a native table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CASES = [
    (1, "v1", "adagrad", "all2all", "graph"),
    (2, "v1", "adagrad", "all2all", "eager"),
    (2, "v1", "adam", "sparse", "graph"),
    (2, "sok", "sgd", "all2all", "eager"),
    (2, "legacy", "adam", "all2all", "eager"),
    (1, "legacy", "adagrad", "sparse", "eager"),
    (2, "v1", "sgd", "all2all", "static"),
    (2, "v1", "adagrad", "frozen", "graph"),
    (2, "v1", "adagrad", "all2all", "defer"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_rows_and_masks_are_those_of_a_native_table(
    run_sok: Callable[..., str], case: tuple[int, str, str, str, str]
) -> None:
    ranks, *arguments = case
    run_sok("masking_loop.py", ranks, *arguments)
