"""The example programs run, are short, and print their (estimated) savings."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_custom_training_loop_skips_examples(capsys):
    runpy.run_path(str(EXAMPLES / "own_training_loop.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    (total,) = (line for line in lines if "examples skipped (" in line)
    assert not total.startswith("0 of")


def would_save(text):
    """Returns the savings that a dry run reports, by kind."""
    reported = re.findall(r"^- ([\d,]+) of [\d,]+ (gradient rows|examples) \(", text, re.MULTILINE)
    return {what: int(count.replace(",", "")) for count, what in reported}


def test_quickstart_prints_speed_and_possible_savings(capsys):
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert re.search(r"^[\d,]+ examples per second", text, re.MULTILINE)
    saved = would_save(text)
    assert set(saved) == {"gradient rows", "examples"} and min(saved.values()) > 0


def test_speed_prints_both_layers_and_ratio(warm):
    keras, ours = run_example(warm, "speed.py", "3000").splitlines()[-2:]
    pattern = r"([\d.]+) ms per step, (?:table of 3,000 x 32|(\d+) times as fast)"
    (theirs, _), (own, ratio) = (re.search(pattern, line).groups() for line in (keras, ours))
    assert keras.startswith("keras.layers.Embedding:") and float(own) > 0
    assert int(ratio) == pytest.approx(float(theirs) / float(own), abs=0.6, rel=0.02)


def test_custom_train_step_records_losses(capsys):
    runpy.run_path(str(EXAMPLES / "own_train_step.py"), run_name="__main__")
    printed = capsys.readouterr().out
    skipped = re.search(r"([\d,]+) examples \(([\d.]+)%\) have been skipped", printed)
    assert float(skipped[2]) > 2 and "max_auc_loss: The AUC rises" in printed


def run_example(warm, name, *arguments, launcher=(), **variables):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **variables,
    }
    command = [*launcher, sys.executable, *warm, str(EXAMPLES / name), *arguments]
    # Run in another folder, because `python -m slipstream_tf...` would find the sources here.
    done = subprocess.run(
        command, env=environment, cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def auc_in(text):
    return float(re.search(r"test AUC ([\d.]+)", text)[1])


def test_rows_example_reads_writes_and_removes_rows(capsys):
    runpy.run_path(str(EXAMPLES / "rows.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert "rows imported from Keras: 50\n" in text and "100 steps: 0.090\n" in text
    assert "rows removed: 2\n" in text and "number of items: 49" in text and "renamed: 1\n" in text
    before, after = map(float, re.search(r"loss .*: ([\d.]+), ([\d.]+)", text).groups())
    assert after < before


def test_parquet_example_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import parquet_input

    monkeypatch.setattr(sys, "argv", ["parquet_input.py", str(tmp_path)])
    parquet_input.write_shards(tmp_path, shards=3, rows=12_345)
    parquet_input.main()
    text = capsys.readouterr().out
    assert auc_in(text) > 0.7 and "clicks-002.parquet" in text
    assert min(would_save(text).values()) > 0
    # The batches contain all rows. None is lost at the end of a file or batch.
    (features, label), *rest = parquet_input.open_shards([tmp_path / "clicks-000.parquet"], 1000)
    assert len(label) + sum(len(label) for _, label in rest) == 12_345
    table = pyarrow.parquet.read_table(tmp_path / "clicks-000.parquet")
    np.testing.assert_array_equal(features["keys"][:, 1], table["item"].to_numpy()[:1000])
    np.testing.assert_allclose(features["dense"][:, 0], np.log1p(table["price"])[:1000], rtol=1e-5)
    np.testing.assert_array_equal(label[:, 0], table["click"].to_numpy()[:1000])


@pytest.mark.parametrize("ranks", [1, 2])
def test_keras_embedding_example_runs_on_ranks(ranks, warm):
    launcher = ()
    if ranks > 1:
        if importlib.util.find_spec("horovod") is None:
            pytest.skip("no Horovod: run `make horovod`")
        horovodrun = str(pathlib.Path(sys.executable).parent / "horovodrun")
        launcher = (horovodrun, "-np", "2", "--gloo", "-H", "localhost:2")
    text = run_example(warm, "keras_embedding_ranks.py", launcher=launcher)
    assert f"trained by {ranks} rank(s)" in text and auc_in(text) > 0.75
    sent = re.search(r"([\d,]+) gradient rows \(([\d.]+)%\) have been sent", text)
    assert 0 < float(sent[2]) < 90
    assert ("'deferred': 0" in text or "'deferred'" not in text) is (ranks == 1)


def test_sequence_example_learns_next_item(capsys):
    runpy.run_path(str(EXAMPLES / "sequence_model.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert auc_in(text) > 0.9 and "500 items" in text


def test_killed_run_resumes_to_same_result(warm):
    lines = run_example(warm, "resume.py", WARM_PYTHON=f"{warm[-1]}/python").splitlines()
    starts = [line for line in lines if line.startswith("starts at step")]
    # The last checkpoint may be incomplete. Then the run continues from the checkpoint before.
    newest = ("starts at step 75", "starts at step 50")
    assert starts[:2] == ["starts at step 0"] * 2 and starts[2] in newest and len(starts) == 3
    assert lines.count("killed at step 90") == 1
    first, second = (line for line in lines if line.startswith("trained 120 steps: "))
    assert first == second


def test_report_example_shows_dry_run(warm, tmp_path):
    pytest.importorskip("matplotlib")
    text = run_example(warm, "dry_run_report.py", str(tmp_path), "generated:20000")
    for part in ("would have saved", "at an estimated cost of", "To save examples", "examples: "):
        assert part in text
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    assert list((tmp_path / "report" / "png").iterdir())


def test_sok_example_reports_training_without_sok(warm):
    flags = ("--data=generated:19200", "--batch_size=96")
    lines = run_example(warm, "sok_dlrm.py", *flags).splitlines()
    assert sum(line.startswith("SOK is not available (") for line in lines) == 1
    assert float(lines[-1].split()[2]) > 0.6 and lines[-1].startswith("test AUC ")


def test_sok_example_differs_from_plain_sok_by_ten_lines():
    plain, ours = (
        (EXAMPLES / name).read_text().splitlines() for name in ("sok_dlrm_plain.py", "sok_dlrm.py")
    )
    changed = [line for line in difflib.ndiff(plain, ours) if line[0] in "+-"]
    assert len(changed) <= 10
    assert all(line[0] == "+" for line in changed)


@pytest.mark.parametrize("name", ["sok_dlrm_plain.py", "sok_parts.py", "sok_clicks.py"])
def test_plain_sok_example_does_not_import_package(name):
    imported = set()
    for node in ast.walk(ast.parse((EXAMPLES / name).read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    allowed = {"__future__", "argparse", "collections.abc", "itertools", "numpy", "tensorflow"}
    allowed |= {"horovod.tensorflow", "sparse_operation_kit", "sok_parts", "sok_clicks"}
    assert imported <= allowed


def test_ranks_split_criteo_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from sok_clicks import batches

    lines = [
        "\t".join([str(i % 2), *map(str, range(12)), "", *(f"{i:x}" for _ in range(25)), ""])
        for i in range(40)
    ]
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join(lines) + "\n")
    found = [list(batches(str(path), "train", 8, rank, 2)) for rank in range(2)]
    # 36 lines are 2 steps of 16 lines, and 4 more lines.
    assert [len(steps) for steps in found] == [2, 2]
    dense, keys, labels = found[1][0]
    assert dense.shape == (8, 13) and keys.shape == (8, 26)
    np.testing.assert_allclose(dense[0, :12], np.log1p(np.arange(12.0)), rtol=1e-6)
    assert dense[0, 12] == 0.0 and keys[0, 25] == 25 << 40
    # Lines 0, 10, 20 and 30 belong to the test part. Rank 1 begins with the ninth of the other
    # lines.
    assert keys[:, 0].tolist() == [9, 11, 12, 13, 14, 15, 16, 17]
    assert labels.tolist() == [key % 2 for key in keys[:, 0]]
    ((_, keys, _),) = batches(str(path), "test", 4, 0, 1)
    assert keys[:, 0].tolist() == [0, 10, 20, 30]
