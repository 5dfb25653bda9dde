"""Three calls in a loop of SOK's own: the engine masks what it masks in a native table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# Of one launch each: most of its time is that of imports.
MASKED = {
    1: ["v1,adagrad,all2all,graph", "legacy,adagrad,sparse,eager", "sok,sgd,all2all,estimated"],
    2: [
        "v1,adagrad,all2all,eager",
        "v1,adam,sparse,graph",
        "sok,sgd,all2all,eager",
        "legacy,adam,all2all,eager",
        "v1,sgd,all2all,static",
        "v1,adagrad,frozen,graph",
        "v1,sgd,all2all,estimated",
    ],
}
DEFERRED = {
    1: ["legacy,sgd,all2all,movement", "legacy,adagrad,all2all,movement"],
    2: [
        "v1,adagrad,all2all,defer",
        "v1,adagrad,all2all,movement",
        "v1,sgd,sparse,movement",
        "sok,sgd,all2all,movement",
    ],
}


@pytest.mark.parametrize("ranks", MASKED)
def test_rows_and_masks_are_those_of_a_native_table(
    run_sok: Callable[..., str], ranks: int
) -> None:
    run_sok("masking_loop.py", ranks, *MASKED[ranks], is_keras_2=True)


@pytest.mark.parametrize("ranks", DEFERRED)
def test_rows_and_held_sums_are_those_of_a_native_table(
    run_sok: Callable[..., str], ranks: int
) -> None:
    run_sok("masking_loop.py", ranks, *DEFERRED[ranks], is_keras_2=True)
