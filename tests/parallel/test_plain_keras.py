"""Keras embeddings on several ranks, under the tape and under the optimizer."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    "count, how, rule", [(2, "tape", "sgd"), (3, "tape", "adagrad"), (3, "fit", "sgd")]
)
def test_ranks_train_as_one_process_does(run_ranks: Any, count: int, how: str, rule: str) -> None:
    done = run_ranks("plain_keras.py", count, how, rule)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert f"rank {rank} of {count}: equal" in done.stdout
