"""Runs the programs of this folder, which check their results, on ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

slow = pytest.mark.slow
DISAGREEMENTS = {
    "tables": "ValueError: Invalid settings of an embedding store on rank 1: tables[1].dim is 5, "
    "but it is 4 on rank 0. Expected the same settings on all ranks.",
    "settings": "ValueError: Invalid settings of Slipstream on rank 1: window.config.steps is 20, "
    "but it is 10 on rank 0. Expected the same settings on all ranks.",
    "rows": "DivergenceError: Window 3: the saturated keys or the threshold T differ between "
    "rank 0 and ranks [1]",
}
# Placement (empty for the default), ranks, update rule, policy. In a sharded table, ranks estimate
# a movement from the smallest accumulator of a row. Therefore with Adagrad they defer less than
# simulated ranks.
FITS = [
    *(("", 3, "adagrad", "plain"), ("", 3, "sgd", "defer")),
    *(("sharded", 3, "adagrad", "plain"), ("sharded", 3, "sgd", "defer")),
    pytest.param("", 2, "sgd", "plain", marks=slow),
    pytest.param("", 2, "adagrad", "defer", marks=slow),
    pytest.param("sharded", 2, "sgd", "plain", marks=slow),
]


def run(
    run_ranks: Any, program: str, count: int, says: str, *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program and asserts that every rank prints `says`.

    {rank} and {count} in `says` are replaced.
    """
    done = run_ranks(program, count, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(count):
        assert says.format(rank=rank, count=count) in done.stdout
    return done


@pytest.mark.parametrize(
    "controller, count, is_cold", [("gloo", 2, True), ("gloo", 4, False), ("mpi", 2, True)]
)
def test_collectives_return_expected_values(
    run_ranks: Any, controller: str, count: int, is_cold: bool
) -> None:
    says = "rank {rank} of {count}: all equal"
    run(run_ranks, "collectives.py", count, says, controller=controller, is_cold=is_cold)


@pytest.mark.parametrize("ranks", ["first", "all"])
def test_constant_batch_size_is_not_folded(run_ranks: Any, ranks: str) -> None:
    """TensorFlow must not fold a collective of constants at graph optimization."""
    run(run_ranks, "constant_batches.py", 2, "rank {rank}: 20 steps", ranks, timeout=60.0)


@pytest.mark.parametrize("placement", [""])
@pytest.mark.parametrize("what, count", [("tables", 3), ("settings", 2), ("rows", 3)])
def test_every_rank_reports_disagreement(
    run_ranks: Any, placement: str, what: str, count: int
) -> None:
    says = "rank {rank}: " + DISAGREEMENTS[what]
    run(run_ranks, "disagreements.py", count, says, what, placement, timeout=240.0)


def test_steps_apply_averaged_gradients(run_ranks: Any) -> None:
    says = "rank {rank} of {count}: all steps are correct"
    run(run_ranks, "steps_on_ranks.py", 2, says)


def test_ranks_export_together(run_ranks: Any, tmp_path: Path) -> None:
    says = "rank {rank} of {count}: all exports are correct"
    run(run_ranks, "exporting.py", 2, says, str(tmp_path))


@pytest.mark.parametrize("placement, count, rule, way", FITS)
def test_fit_on_ranks_equals_single_process(
    run_ranks: Any, placement: str, count: int, rule: str, way: str
) -> None:
    says = "rank {rank} of {count}: equal"
    run(run_ranks, "fit_equals_one.py", count, says, rule, placement, way)


@pytest.mark.parametrize("placement", [pytest.param("", marks=slow), "sharded"])
def test_every_example_is_trained_or_skipped(run_ranks: Any, placement: str) -> None:
    run(run_ranks, "fit_skips_inputs.py", 2, "rank {rank} of {count}: ", placement)


@pytest.mark.parametrize("what", ["logs", "evaluates_alone", "checkpoint", "replicated", "sharded"])
def test_keras_callbacks_run_after_ranks_callback(run_ranks: Any, what: str) -> None:
    done = run(
        run_ranks, "keras_callbacks.py", 2, "rank {rank} of {count}: all values are correct", what
    )
    if what == "logs":
        assert "metrics ['largest'] cannot be summed" in done.stderr


@pytest.mark.parametrize("count, cases", [(2, 8), pytest.param(3, 8, marks=slow)])
def test_prefetched_keys_change_no_bit(run_ranks: Any, count: int, cases: int) -> None:
    says = f"rank {{rank}} of {{count}}: {cases} cases equal"
    run(run_ranks, "prefetching.py", count, says, str(cases), "1")


@pytest.mark.parametrize(
    "count, way", [pytest.param(3, "plain", marks=slow), (2, "mask"), (3, "defer")]
)
def test_training_with_prefetched_keys_is_bitwise_equal(
    run_ranks: Any, count: int, way: str
) -> None:
    run(run_ranks, "fit_prefetching.py", count, "rank {rank} of {count}: equal", way)


@pytest.mark.parametrize(
    "placement, count, cases",
    [
        *(("replicated", 3, 64), ("sharded", 3, 40), ("prefetched", 2, 24)),
        pytest.param("replicated", 2, 100, marks=slow),
        pytest.param("replicated", 4, 40, marks=slow),
        pytest.param("sharded", 2, 60, marks=slow),
        pytest.param("prefetched", 3, 16, marks=slow),
    ],
)
def test_random_cases_on_ranks_equal_single_process(
    run_ranks: Any, placement: str, count: int, cases: int
) -> None:
    says = f"rank {{rank}} of {{count}}: {cases} cases equal"
    run(run_ranks, "random_cases.py", count, says, placement, str(cases), "1")


@pytest.mark.parametrize("count", [2, 3])
def test_replicas_stay_within_budget_and_send_few_bytes(run_ranks: Any, count: int) -> None:
    says = "rank {rank} of {count}: all replicas are correct"
    run(run_ranks, "sharded_copies.py", count, says)


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_calls_of_a_step_are_one_update(run_ranks: Any, placement: str) -> None:
    run(run_ranks, "one_update.py", 2, "rank {rank}: equal", placement, timeout=120.0)
