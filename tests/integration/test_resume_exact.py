"""A killed run resumes bitwise like an uninterrupted run, with every policy.

Three processes train with all policies. The first trains 2k steps without a break. The second
writes a checkpoint after k steps, within a window, trains some more steps, and is killed while the
next checkpoint is half written. The third continues from the second one's checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("resuming_exactly.py")
_spec = importlib.util.spec_from_file_location("slipstream_resuming_exactly", PROGRAM)
assert _spec is not None and _spec.loader is not None
program = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)
HALF, WAYS, WINDOW = program.HALF, program.WAYS, program.WINDOW


@pytest.fixture(scope="module")
def results(warm: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the results of all three processes."""
    folder = tmp_path_factory.mktemp("runs")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for what, directory in (("straight", "a"), ("killed", "b"), ("resumed", "b")):
        (folder / what).mkdir()
        done = subprocess.run(
            [sys.executable, *warm, PROGRAM, folder / directory, folder / what, what],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == (-signal.SIGKILL if what == "killed" else 0), output
    assert (folder / "b" / list(WAYS)[-1] / ".saving").exists()
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_resumed_run_equals_uninterrupted_run_bitwise(way: str, results: Path) -> None:
    with (
        np.load(results / "straight" / f"{way}.npz") as straight,
        np.load(results / "resumed" / f"{way}.npz") as resumed,
    ):
        assert set(straight) == set(resumed)
        for name in straight:
            one, other = straight[name], resumed[name]
            assert one.dtype == other.dtype and one.shape == other.shape, name
            assert one.tobytes() == other.tobytes(), name
        losses = straight["losses"]
        assert len(losses) == 2 * HALF and len(set(losses)) > HALF
        deferred = sum(len(straight[f"f{i}_held_keys"]) for i in range(3))
    texts = [(results / what / f"{way}.json").read_text() for what in ("straight", "resumed")]
    assert texts[0] == texts[1]
    # Check that the checkpoint had state to lose.
    reports = json.loads(texts[0])
    assert len(reports) == 2 * HALF // WINDOW and HALF % WINDOW
    rows = [table["rows"] for report in reports for table in report["tables"]]
    goes_by_keys = way not in ("defer", "predicted", "random")
    assert (max(report["saturated_keys"] for report in reports) > 0) >= goes_by_keys
    skips_inputs = way in ("inputs", "predicted", "both", "random")
    assert (sum(report["examples_skipped"] for report in reports) > 0) == skips_inputs
    assert (sum(counts["masked"] for counts in rows) > 0) == (way == "mask")
    assert (sum(counts["deferred"] for counts in rows) > 0) == (way in ("defer", "both"))
    assert (deferred > 0) == (way in ("defer", "both"))
