"""Three calls in a loop of SOK's own: the engine masks what it masks in a native table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CASES = {
    1: [
        "v1,adagrad,all2all,graph",
        "legacy,adagrad,sparse,eager",
        "legacy,sgd,all2all,movement",
        "legacy,adagrad,all2all,movement",
    ],
    2: [
        "v1,adagrad,all2all,eager",
        "v1,adam,sparse,graph",
        "sok,sgd,all2all,eager",
        "legacy,adam,all2all,eager",
        "v1,sgd,all2all,static",
        "v1,adagrad,frozen,graph",
        "v1,adagrad,all2all,defer",
        "v1,adagrad,all2all,movement",
        "v1,sgd,sparse,movement",
        "sok,sgd,all2all,movement",
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_rows_and_masks_are_those_of_a_native_table(
    run_sok: Callable[..., str], ranks: int
) -> None:
    # Of one launch: most of its time is that of imports.
    run_sok("masking_loop.py", ranks, *CASES[ranks])
