"""Plain Keras embeddings on ranks, with the tape and the optimizer."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    "count, how, rule",
    [
        pytest.param(2, "tape", "sgd", marks=pytest.mark.slow),
        *((3, "tape", "adagrad"), (3, "fit", "sgd")),
    ],
)
def test_ranks_equal_single_process(run_ranks: Any, count: int, how: str, rule: str) -> None:
    done = run_ranks("plain_keras.py", count, how, rule)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: equal" in done.stdout


@pytest.mark.parametrize(
    "count, how, trigger",
    [
        *((2, "tape", "movement"), (3, "fit", "interval")),
        pytest.param(2, "fit", "movement", marks=pytest.mark.slow),
    ],
)
def test_deferring_loses_no_gradient_and_sends_fewer_bytes(
    run_ranks: Any, count: int, how: str, trigger: str
) -> None:
    done = run_ranks("plain_keras_defers.py", count, how, trigger)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: equal" in done.stdout
