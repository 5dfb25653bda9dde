"""Random op calls return a result or raise an error, without crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from calling_ops import op_names

from slipstream_tf.ops import _loader

PROGRAM = Path(__file__).with_name("calling_ops.py")
SECONDS = os.environ.get("SLIPSTREAM_FUZZ_SECONDS")
CASES = 600
# Timeout of one process, including the start of TensorFlow.
TIMEOUT_SECONDS = 180


@pytest.mark.parametrize(
    "seed", range(4) if SECONDS else (0, pytest.param(1, marks=pytest.mark.slow))
)
def test_random_op_calls_return_result_or_raise(tmp_path: Path, seed: int) -> None:
    journal = tmp_path / "journal.json"
    seconds = float(SECONDS) / 4 if SECONDS else TIMEOUT_SECONDS / 2
    cases = 10**9 if SECONDS else CASES
    arguments = [str(seed), str(cases), str(seconds), str(journal)]
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        # Ops create temporary folders there.
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    try:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds + TIMEOUT_SECONDS / 2,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"the program hangs in {journal.read_text()[:2000]}")
    # A negative return code is the number of the signal that ended the process.
    assert done.returncode == 0, f"{journal.read_text()[:2000]}\n{done.stderr[-2000:]}"
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == len(op_names(_loader.library()))
    # Every op has a valid call before the random calls. Ops that need a GPU would be listed here.
    assert [name for name, of_op in results.items() if "valid" not in of_op] == []
    without = [name for name, of_op in results.items() if "result" not in of_op]
    assert len(without) < len(results) / 4, without
    if not SECONDS:
        assert sum(map(len, results.values())) > 2 * len(results)
