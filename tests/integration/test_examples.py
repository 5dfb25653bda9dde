"""The examples run, are short, and show that inputs were skipped."""

from __future__ import annotations

import ast
import difflib
import os
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) < 100


@pytest.mark.parametrize("name", ["quickstart.py", "own_training_loop.py"])
def test_example(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    totals = [line for line in capsys.readouterr().out.splitlines() if "inputs skipped (" in line]
    assert len(totals) == 1
    assert not totals[0].startswith("0 of")


def test_sok_example_says_that_it_trains_without_sok():
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(EXAMPLES / "sok_dlrm.py"), "--data=generated:19200"]
    done = subprocess.run(
        [*command, "--batch_size=96"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("No SOK here (") for line in lines) == 1
    assert float(lines[-1].split()[2]) > 0.6 and lines[-1].startswith("test AUC ")


def test_ten_lines_make_the_difference_to_plain_sok():
    plain, ours = (
        (EXAMPLES / name).read_text().splitlines() for name in ("sok_dlrm_plain.py", "sok_dlrm.py")
    )
    changed = [line for line in difflib.ndiff(plain, ours) if line[0] in "+-"]
    assert len(changed) <= 10
    assert all(line[0] == "+" for line in changed)


@pytest.mark.parametrize("name", ["sok_dlrm_plain.py", "sok_parts.py", "sok_clicks.py"])
def test_plain_sok_does_without_this_package(name):
    imported = set()
    for node in ast.walk(ast.parse((EXAMPLES / name).read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    allowed = {"__future__", "argparse", "collections.abc", "itertools", "numpy", "tensorflow"}
    allowed |= {"horovod.tensorflow", "sparse_operation_kit", "sok_parts", "sok_clicks"}
    assert imported <= allowed


def test_a_criteo_file_is_shared_among_ranks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from sok_clicks import batches

    lines = [
        "\t".join([str(i % 2), *map(str, range(12)), "", *(f"{i:x}" for _ in range(25)), ""])
        for i in range(40)
    ]
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join(lines) + "\n")
    found = [list(batches(str(path), "train", 8, rank, 2)) for rank in range(2)]
    assert [len(steps) for steps in found] == [2, 2]  # 36 lines are 2 steps of 16, and 4 more.
    dense, keys, labels = found[1][0]
    assert dense.shape == (8, 13) and keys.shape == (8, 26)
    np.testing.assert_allclose(dense[0, :12], np.log1p(np.arange(12.0)), rtol=1e-6)
    assert dense[0, 12] == 0.0 and keys[0, 25] == 25 << 40
    # Lines 0, 10, 20 and 30 are the test's: rank 1 begins with the ninth of the others.
    assert keys[:, 0].tolist() == [9, 11, 12, 13, 14, 15, 16, 17]
    assert labels.tolist() == [key % 2 for key in keys[:, 0]]
    ((_, keys, _),) = batches(str(path), "test", 4, 0, 1)
    assert keys[:, 0].tolist() == [0, 10, 20, 30]
