"""`model.fit` on several ranks: equal to one process on all inputs, and uneven ends."""

from __future__ import annotations

from typing import Any

import pytest

# The empty placement is the default. Ranks of a sharded table judge a movement by the smallest
# accumulator of a row: with Adagrad they hold less than simulated ranks do.
WAYS = [
    *(("", 3, "adagrad", "none"), ("", 3, "sgd", "defer")),
    *(("sharded", 3, "adagrad", "none"), ("sharded", 3, "sgd", "defer")),
    pytest.param("", 2, "sgd", "none", marks=pytest.mark.slow),
    pytest.param("", 2, "adagrad", "defer", marks=pytest.mark.slow),
    pytest.param("sharded", 2, "sgd", "none", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("placement, count, rule, skip", WAYS)
def test_ranks_train_as_one_process_does(
    run_ranks: Any, placement: str, count: int, rule: str, skip: str
) -> None:
    done = run_ranks("fit_equals_one.py", count, rule, placement, skip)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: equal" in done.stdout


@pytest.mark.parametrize("placement", [pytest.param("", marks=pytest.mark.slow), "sharded"])
def test_every_input_is_trained_or_skipped(run_ranks: Any, placement: str) -> None:
    done = run_ranks("fit_skips_inputs.py", 2, placement)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: " in done.stdout
