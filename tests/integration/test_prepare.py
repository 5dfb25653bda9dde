"""slipstream-prepare resumes after a kill, writes trainable data, and reports errors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream_tf.cli import data as cli_data
from slipstream_tf.cli import prepare, train
from slipstream_tf.cli.program import run_program
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.readers.registry import open_data


def data_folder() -> Path:
    """Returns the folder of the data samples.

    It is $SLIPSTREAM_DATA, or ../shared/data relative to the repository.
    """
    root = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("SLIPSTREAM_DATA") or root.parent / "shared" / "data")


def write_criteo(path: Path, lines: int) -> Path:
    """Writes lines in Criteo's format. The label depends on the first key."""
    rng = np.random.default_rng(0)
    keys = (rng.pareto(1.0, (lines, 26)) * 9).astype(np.int64)
    labels = rng.random(lines) < 0.1 + 0.6 * (keys[:, 0] % 2)
    counts = rng.integers(0, 99, (lines, 13))
    with open(path, "w", encoding="ascii") as file:
        for label, numbers, row in zip(labels, counts.tolist(), keys.tolist(), strict=True):
            values = [*map(str, numbers), *(f"{key:08x}" for key in row)]
            file.write("\t".join([str(int(label)), *values]) + "\n")
    return path


def digests(folder: Path) -> dict[str, str]:
    """Returns file -> digest for a folder, without its empty lock file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def start(*arguments: object) -> subprocess.Popen[str]:
    """Starts slipstream-prepare in a new process."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from slipstream_tf.cli.prepare import entry_point; entry_point()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: object) -> int:
    """Runs slipstream-prepare in this process and returns its exit code."""
    return run_program(prepare.make_flags(), prepare.main, [str(a) for a in arguments])


def shards_in(folder: Path) -> int:
    try:
        return len(json.loads((folder / "prepared.json").read_text())["shards"])
    except FileNotFoundError:
        return 0


def test_killed_preparation_resumes_to_same_bytes(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "lines.tsv", 15_000)
    flags = (path, "--shard_rows=300", "--threads=2", "--hot_set_memory=100KiB")
    assert run(*flags, f"--output={tmp_path / 'whole'}") == 0
    whole = digests(tmp_path / "whole")
    folder, found = tmp_path / "killed", []
    for wanted in (4, 20):
        process = start(*flags, f"--output={folder}")
        try:
            deadline = time.monotonic() + 240
            while shards_in(folder) < wanted and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        found.append(shards_in(folder))
    assert 4 <= found[0] < found[1] < 50
    shard = folder / "train" / "000000.parquet"
    written = shard.stat().st_mtime_ns
    process = start(*flags, f"--output={folder}")
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "absl" not in errors  # TensorFlow's first lines ignore TF_CPP_MIN_LOG_LEVEL.
    assert digests(folder) == whole
    assert shard.stat().st_mtime_ns == written
    assert f"{15_000 - 300 * found[1]:,} lines were read" in output


def test_concurrent_preparation_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    path = write_criteo(tmp_path / "lines.tsv", 200)
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / ".lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(path, f"--output={tmp_path / 'out'}") == 1
    assert "Another process prepares data in " in capsys.readouterr().err


def test_training_on_shards_equals_training_on_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_criteo(tmp_path / "lines.tsv", 6_000)
    assert run(path, f"--output={tmp_path / 'out'}", "--shard_rows=1100") == 0

    def trained(path: Path, *flags: str) -> dict[str, Any]:
        output = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        flags = (
            f"--data={path}", "--dim=4", "--mlp=8", "--bottom=8", "--batch_size=128", "--epochs=2",
            "--shuffle=none", f"--output={output}", *flags,
        )  # fmt: skip
        code = run_program(train.make_flags(), train.main, flags)
        assert code == 0
        return json.loads((output / "metrics.json").read_text())

    lines = trained(path)
    # The click rate of a text file is unknown, so that the first output is 0.
    facts_of = cli_data.facts_of
    monkeypatch.setattr(
        cli_data, "facts_of", lambda data: dataclasses.replace(facts_of(data), click_rate=None)
    )
    shards = trained(tmp_path / "out")
    assert shards["data"] == lines["data"] == "criteo"
    for entry in ("test", "examples", "rows"):
        assert shards[entry] == lines[entry]
    shuffled = trained(tmp_path / "out", "--shuffle=shards")
    assert shuffled["examples"] == lines["examples"] and shuffled["test"] != lines["test"]


@pytest.mark.parametrize("file", ["criteo_first10k.tsv", "avazu_first9k.csv"])
def test_prepared_samples_equal_reader_output(file: str, tmp_path: Path) -> None:
    path = data_folder() / file
    if not path.is_file():
        pytest.skip(f"no {file} in SLIPSTREAM_DATA or ../shared/data")
    assert run(path, f"--output={tmp_path / 'out'}", "--shard_rows=3000") == 0
    for part in ("train", "test"):
        ours = PreparedReader(tmp_path / "out", 512, part=part).dataset()
        theirs = open_data(path, part, 512).dataset()
        for (one, label), (other, expected) in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(label, expected)
            assert one.keys() == other.keys()
            for name in other:
                np.testing.assert_array_equal(one[name], other[name])


def test_custom_csv_is_prepared_and_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{i % 2},u{i % 40},{i % 5}|{i % 3},{i / 8}" for i in range(3_000)]
    lines[7] = "1,u1"
    lines[9] = "maybe,u1,1,1"
    path = tmp_path / "clicks.csv"
    path.write_text("\n".join(["clicked,user,tags,price", *lines]) + "\n")
    schema = tmp_path / "clicks.json"
    tags = {"column": "tags", "separator": "|", "as": "integer"}
    price = {"column": "price", "transform": "log"}
    schema.write_text(json.dumps({"label": "clicked", "keys": ["user", tags], "dense": [price]}))
    out = tmp_path / "out"
    assert run(path, f"--schema={schema}", f"--output={out}", "--dim=1") == 0
    printed = capsys.readouterr().out
    assert "Statistics of the logarithms, sign(v) * log(1 + |v|): price.\n" in printed
    skipped = "2 malformed lines (0.07% of all lines) were skipped. The first is "
    reason = "  1 line: the line has 2 columns"
    assert f"{skipped}{path}:9. The reasons:\n{reason}" in printed
    assert printed.count("the line has 2 columns") == 1
    command = f"slipstream-train --data={out} --export=model"
    assert f"To train and store the model in the folder 'model', run: {command}" in printed
    assert "The test part is lines 901 to 1,000 of each 1,000 lines of all files" in printed
    # All keys fit into the hot set, so that all examples are hot.
    assert "user" in printed and "examples are hot" not in printed
    assert f"{out} contains 1 shard; 3,000 lines were read" in printed
    code = run_program(
        train.make_flags(),
        train.main,
        [f"--data={out}", "--dim=4", "--mlp=4", "--epochs=1", f"--output={tmp_path / 'run'}"],
    )
    assert code == 0
    record = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert record["rows"] == {"user": 40, "tags": 5}
    assert record["examples"]["trained"] + record["test"]["examples"] == 2_998


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--output={out}",), 2, ("argument DATA",)),
        (("{data}",), 2, ("--output",)),
        (("{data}", "--output={out}", "--format=tsv"), 2, ("--format=tsv", "criteo, avazu")),
        (("{data}", "--output={out}", "--schema={data}"), 2, ("--schema", "not valid JSON")),
        (("{out}/none", "--output={out}"), 2, ("none", "DATA")),
        (("{data}", "--output={out}", "--format=csv"), 2, ("requires a schema", "--schema")),
        (("{data}", "--output={out}", "--hot_set_memory=10"), 2, ("--hot_set_memory", "64")),
        (
            ("{data}", "--output={data}"),
            2,
            ("--output=", "lines.tsv", "can be created and written"),
        ),
        (("{data}", "--output={out}", "--schema={out}"), 2, ("--schema=", "No such file")),
        (("{data}", "--output={out}", "--strict", "--max_bad_fraction=0"), 2, ("--max_bad_frac",)),
        (
            ("{data}", "--output={out}"),
            1,
            ("pass --max_bad_fraction=1", "1 of 6 lines (16.7%) are malformed. Expected at most"),
        ),
        (
            ("{data}", "--output={out}", "--strict"),
            1,
            ("lines.tsv:3: the line has 2 columns", "--strict"),
        ),
    ],
)
def test_errors_print_one_line(
    arguments: tuple[str, ...],
    code: int,
    named: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_criteo(tmp_path / "lines.tsv", 5)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "1\t2", *lines[2:]]))
    filled = [a.format(data=path, out=tmp_path / "out") for a in arguments]
    assert run(*filled) == code
    captured = capsys.readouterr()
    assert "slipstream-train" not in captured.out
    # The progress bar is on the same stream.
    message = captured.err[captured.err.index("slipstream-prepare: ") :]
    is_list = "pass --max_bad_fraction=1" in named
    assert is_list or len(message.splitlines()) == 1
    for text in named:
        assert text in message


def test_help_fits_screen_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    assert "slipstream-prepare clicks.csv --schema=clicks.json --output=clicks" in "\n".join(lines)


@pytest.mark.parametrize("order", ["shards", "examples"])
def test_shuffling_needs_prepared_data(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data=generated:1000", f"--shuffle={order}"]
    assert run_program(train.make_flags(), train.main, arguments) == 2
    assert "It requires data that slipstream-prepare wrote" in capsys.readouterr().err


def write_clicks(path: Path, rows: range, label: Any = None) -> Path:
    """Writes a CSV file and its schema next to it."""
    lines = [f"{i % 2 if label is None else label},u{i % 7},{i}" for i in rows]
    path.write_text("\n".join(["click,keys,hour", *lines]) + "\n")
    schema = {"label": "click", "keys": ["keys"], "time": "hour"}
    (path.parent / "clicks.json").write_text(json.dumps(schema))
    return path


def test_parts_are_chosen_by_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_clicks(tmp_path / "clicks.csv", range(1_000))
    other = write_clicks(tmp_path / "other.csv", range(50))
    third = write_clicks(tmp_path / "third.csv", range(50))
    schema = f"--schema={tmp_path / 'clicks.json'}"
    for number, (flags, inputs) in enumerate(
        {
            ("--split=time", "--test_fraction=0.3"): (700, 0, 300),
            ("--split=time", "--valid_fraction=0.2"): (700, 200, 100),
            ("--split=random", "--split_seed=3"): None,
            (f"--test={other},{third}",): (1_000, 0, 100),
            (f"--test={other}", f"--valid={third}"): (1_000, 50, 50),
            (f"--valid={other}",): (900, 50, 100),
        }.items()
    ):
        output = tmp_path / f"out{number}"
        assert run(data, schema, f"--output={output}", *flags) == 0
        printed = capsys.readouterr().out
        assert "slipstream-train --data=" in printed
        named = {
            "--split=time": "the last lines by the column 'hour', from ",
            "--split=random": "drawn at random for each",
        }
        kind = "the lines of --test" if flags[0].startswith("--test") else "lines 901 to 1,000"
        assert f"The test part is {named.get(flags[0], kind)}" in printed
        found = tuple(json.loads((output / "statistics.json").read_text())["inputs"].values())
        if inputs is None:
            assert sum(found) == 1_000 and 60 < found[2] < 140
        else:
            assert found == inputs
    for flags, named in (
        (("--split_seed=1",), "--split_seed in this run. It requires --split=random"),
        (("--test_fraction=0.2",), "--test_fraction in this run. It requires --split=random or"),
        (("--split=random", f"--test={other}"), "It requires a run without --test"),
        (("--split=time", f"--valid={other}", "--valid_fraction=0.1"), "and no --valid"),
        (("--split=random", "--test_fraction=0.9", "--valid_fraction=0.1"), "a sum below 1"),
        (("--test=nothing.csv",), "flag --test: There is no data file"),
    ):
        assert run(data, schema, f"--output={tmp_path / 'out'}", *flags) == 2
        assert named in capsys.readouterr().err
    assert run(write_criteo(tmp_path / "a.tsv", 9), "--split=time", "--output=x") == 2
    assert "--split=time in this run. It requires a --schema with" in capsys.readouterr().err


def test_files_of_other_parts_are_left_out_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in (("a", 400), ("b", 30), ("c", 50)):
        write_clicks(folder / f"{name}.csv", range(count))
    monkeypatch.chdir(tmp_path)
    os.symlink(folder, "link")
    schema = f"--schema={folder / 'clicks.json'}"
    flags = (schema, "--format=csv", "--test=link/c.csv", "--valid=data/b.csv")
    assert run(folder, *flags, "--output=out") == 0
    printed = capsys.readouterr().out
    assert "DATA is read without the files of --valid and --test in its folders" in printed
    assert f"(number: 2, first: {folder / 'b.csv'})." in printed
    found = json.loads(Path("out/statistics.json").read_text())["inputs"]
    assert found == {"train": 400, "valid": 30, "test": 50}
    for arguments, named in (
        (("data/a.csv", "--test=link/a.csv"), "DATA: data/a.csv is also in the flag --test"),
        (("data/a.csv", "data"), "data/a.csv is also in the argument DATA"),
        (("data/a.csv", "--test=data/b.csv,data/b.csv"), "b.csv is also in the flag --test"),
        (("data/a.csv", "--test=data/b.csv", "--valid=link/b.csv"), "is also in the flag --valid"),
        (("data", "--test=link"), "DATA: --valid and --test name all of its files"),
    ):
        assert run(*arguments, schema, "--format=csv", "--output=out2") == 2
        assert named in capsys.readouterr().err


def test_labels_other_than_0_and_1_give_no_advice_to_accept_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for labels, lines in (("yes", "no well-formed example. 50 of 50"), ("12345", "40 of 50 lines")):
        data = write_clicks(tmp_path / "clicks.csv", range(50))
        rows = [f"{label},u,1" for label in ([labels] if labels == "yes" else labels)]
        data.write_text("\n".join(["click,keys,hour", *rows * (50 // len(rows))]))
        out = f"--output={tmp_path / 'out'}"
        assert run(data, f"--schema={tmp_path / 'clicks.json'}", out, "--overwrite") == 1
        printed = capsys.readouterr().err
        assert lines in printed and "--max_bad_fraction" not in printed
        assert "`positive_from` for numbers, for example ratings" in printed


def refuse_to_train(folder: Path, *flags: str) -> int:
    arguments = [f"--data={folder}", "--model=dcn", *flags]
    return run_program(train.make_flags(), train.main, arguments)


def test_data_that_cannot_be_trained_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, out = f"--schema={tmp_path / 'clicks.json'}", tmp_path / "out"
    for rows, label, note, error in (
        (2_000, 1, "all training examples have the label 1", "all 1,800 training examples have"),
        (2_000, 0, "all training examples have the label 0", "have the label 0. Expected examples"),
        (9, None, "slipstream-train needs a test part", "the part 'test' contains no examples"),
    ):
        data = write_clicks(tmp_path / "clicks.csv", range(rows), label)
        assert run(data, schema, f"--output={out}", "--overwrite") == 0
        printed = capsys.readouterr().out
        assert note in printed and "--split" in printed and "To train" not in printed
        assert refuse_to_train(out) == 2
        assert error in capsys.readouterr().err


def test_text_file_without_test_part_is_refused_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, error = write_criteo(tmp_path / "a.tsv", 900), "Invalid flag --data"
    assert refuse_to_train(data) == 2
    printed = capsys.readouterr().err
    assert (
        f"{error}={data}: the file has 900 lines, but the part 'test' begins at line 901" in printed
    )
    assert f"slipstream-prepare {data} --output=FOLDER" in printed
    write_criteo(data, 800)
    assert refuse_to_train(data, "--evaluate_on=valid") == 2
    assert "800 lines, but the part 'valid' begins at line 801" in capsys.readouterr().err


def test_shuffling_one_shard_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_clicks(tmp_path / "clicks.csv", range(200))
    assert run(data, f"--schema={tmp_path / 'clicks.json'}", f"--output={tmp_path / 'out'}") == 0
    assert refuse_to_train(tmp_path / "out", "--shuffle=shards") == 2
    error = capsys.readouterr().err
    assert "Invalid flag --shuffle=shards" in error and "--shuffle=examples" in error


def test_timestamps_and_ids_among_numbers_are_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{i % 2},a,{1_700_000_000 + i},{i},{i % 7}" for i in range(1_000)]
    (tmp_path / "a.csv").write_text("\n".join(["y,k,time,row,age", *lines]) + "\n")
    schema = {"label": "y", "keys": ["k"], "dense": ["time", "row", "age"]}
    (tmp_path / "a.json").write_text(json.dumps(schema))
    out = f"--output={tmp_path / 'out'}"
    assert run(tmp_path / "a.csv", f"--schema={tmp_path / 'a.json'}", out) == 0
    printed = capsys.readouterr().out
    assert "Warning: the numbers of 'time' look like timestamps" in printed
    assert "Warning: the numbers of 'row' look like ids" in printed
    assert "'age'" not in printed
    assert re.search(r"^age +0\.0% .+ 0 +6$", printed, re.MULTILINE)
