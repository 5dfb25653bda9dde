"""A killed run with rows on disk resumes bitwise from its checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from slipstream_tf import Storage

PROGRAM = Path(__file__).with_name("spilling_until_killed.py")
_spec = importlib.util.spec_from_file_location("slipstream_spilling_until_killed", PROGRAM)
assert _spec is not None and _spec.loader is not None
program = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)
# Set KILLS=50 for a longer test.
KILLS, STEPS = int(os.environ.get("KILLS", "6")), 50


def run(warm: list[str], folder: Path, steps: int, seconds: float) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *warm, PROGRAM, folder, str(steps), str(seconds)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_killed_spilling_run_equals_run_in_memory(warm: list[str], tmp_path: Path) -> None:
    random = np.random.default_rng()
    # The last kill is late enough that even a busy machine has saved a checkpoint.
    for seconds in (*random.uniform(0.01, 1.0, KILLS - 1), 4.0):
        code, output = run(warm, tmp_path, 10**9, seconds)
        assert code == -signal.SIGKILL, output
        # The unnamed spill files are gone.
        assert not list((tmp_path / "spill").iterdir())
    code, output = run(warm, tmp_path, STEPS, 0)
    assert code == 0, output
    begin = next(int(line.split()[1]) for line in output.splitlines() if line[:5] == "from ")
    assert begin > 0
    store = program.make(Storage())
    for step in range(begin + STEPS):
        program.train(store, step)
    with np.load(tmp_path / "table.npz") as found:
        for name, values in store.export_table("t").items():
            np.testing.assert_array_equal(values, found[name], err_msg=name)
