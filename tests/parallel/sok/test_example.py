"""The DLRM example learns the same with and without SOK or engine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

BATCH, STEPS = 128, 200
FALLBACK = "SOK is not available"


def flags(ranks: int) -> list[str]:
    return [f"--data=generated:{BATCH * STEPS * ranks}", f"--batch_size={BATCH}"]


def auc_of(output: str) -> float:
    (found,) = re.findall(r"test AUC (\d\.\d+) of \d+ examples", output)
    return float(found)


def rows_of(output: str) -> tuple[int, int]:
    """Returns the numbers of sent and of all gradient rows."""
    (found,) = re.findall(r"([\d,]+) of ([\d,]+) gradient rows sent", output)
    applied, offered = (int(number.replace(",", "")) for number in found)
    return applied, offered


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_example_trains_with_and_without_sok(
    run_ranks: Callable[..., subprocess.CompletedProcess[str]],
    request: pytest.FixtureRequest,
    ranks: int,
) -> None:
    arguments = ("sok_dlrm.py", *flags(ranks))
    done = run_ranks("sok/example.py", ranks, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    native = done.stdout
    # SOK can be imported from here on.
    others = request.getfixturevalue("run_sok")("example.py", ranks, *arguments)
    assert native.count(FALLBACK) == 1 and FALLBACK not in others
    for output in (native, others):
        applied, offered = rows_of(output)
        assert 0 < applied < 0.95 * offered
    assert auc_of(others) > 0.7
    assert abs(auc_of(native) - auc_of(others)) < 0.01


def test_example_trains_without_engine(run_sok: Callable[..., str]) -> None:
    output = run_sok("example.py", 2, "sok_dlrm_plain.py", *flags(2))
    assert auc_of(output) > 0.7 and "sent" not in output
