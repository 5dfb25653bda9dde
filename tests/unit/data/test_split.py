"""Tests of the division into training, validation and test part in `data.split`."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream_tf.cli.prepare import test_part as describe_test_part
from slipstream_tf.data.opening import open_source
from slipstream_tf.data.preparation import Options, prepare
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.schema import parse_schema
from slipstream_tf.data.split import Split, find_limits

SCHEMA = {"label": "click", "keys": [{"column": "row", "as": "integer"}]}


def write(path, rows, times=None):
    """Writes rows with the row number as key, and optionally a time."""
    lines = ["click,row,time"]
    lines += [f"{i % 2},{i},{i if times is None else times[i]}" for i in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def parts_of(folder):
    """Returns the row numbers of each part in the folder."""
    found = {}
    for part in ("train", "valid", "test"):
        files = sorted((folder / part).glob("*.parquet")) if (folder / part).exists() else []
        found[part] = [row for path in files for row in pq.read_table(path)["row"].to_pylist()]
    return found


def keys_of(folder, part, **options):
    reader = PreparedReader(folder, 64, part=part, **options)
    found = [key for x, _ in reader.dataset() for key in x["keys"].numpy()[:, 0].tolist()]
    assert len(found) == reader.spec.num_examples
    return found


@pytest.mark.parametrize("rows", [10, 25, 899, 999])
def test_small_data_has_examples_in_every_part(tmp_path, run_prepare, rows):
    path = write(tmp_path / "a.csv", range(rows))
    run_prepare(path, tmp_path / "out", schema=parse_schema(SCHEMA), shard_rows=300)
    test = list(range(9, rows, 10))
    train = [i for i in range(rows) if i % 10 != 9]
    assert parts_of(tmp_path / "out") == {"train": train, "valid": [], "test": test}
    if rows > 10:
        valid = train[9::10]
        assert keys_of(tmp_path / "out", "valid") == valid
        held_out = keys_of(tmp_path / "out", "train", hold_out=True)
        assert held_out == [i for i in train if i not in valid]


def test_large_data_is_divided_into_runs(tmp_path, run_prepare):
    path = write(tmp_path / "a.csv", range(1_000))
    run_prepare(path, tmp_path / "out", schema=parse_schema(SCHEMA))
    assert parts_of(tmp_path / "out")["test"] == list(range(900, 1_000))


def test_small_files_are_counted_together(tmp_path, run_prepare):
    paths = [write(tmp_path / f"{i}.csv", range(4 * i, 4 * i + 4)) for i in range(5)]
    run_prepare(paths, tmp_path / "out", schema=parse_schema(SCHEMA))
    assert parts_of(tmp_path / "out")["test"] == [9, 19]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize(("files", "rows"), [(10, 500), (10, 920), (3, 1_500)])
def test_runs_are_counted_over_all_files(tmp_path, run_prepare, form, files, rows):
    paths = []
    for i in range(files):
        paths.append(tmp_path / f"{i:02d}.{form}")
        numbers = range(rows * i, rows * (i + 1))
        if form == "csv":
            write(paths[-1], numbers)
        else:
            lines = [f'{{"click": {row % 2}, "row": {row}}}\n' for row in numbers]
            paths[-1].write_text("".join(lines))
    run_prepare(paths, tmp_path / "out", schema=parse_schema(SCHEMA), shard_rows=300)
    test = [row for row in range(files * rows) if row // 100 % 10 == 9]
    assert parts_of(tmp_path / "out")["test"] == test


def test_random_split_depends_on_seed_only(tmp_path, run_prepare):
    path = write(tmp_path / "a.csv", range(3_000))
    found = []
    for name, seed, shard_rows in (("a", 0, 100), ("b", 0, 3_000), ("c", 1, 3_000)):
        split = Split("random", test_fraction=0.2, valid_fraction=0.1, seed=seed)
        options = {"schema": parse_schema(SCHEMA), "shard_rows": shard_rows, "split": split}
        run_prepare(path, tmp_path / name, **options)
        found.append(parts_of(tmp_path / name))
    assert found[0] == found[1] != found[2]
    rows = [row for part in found[0].values() for row in part]
    assert sorted(rows) == list(range(3_000))
    assert len(found[0]["test"]) == pytest.approx(600, abs=80)
    assert len(found[0]["valid"]) == pytest.approx(300, abs=60)
    # Seeds are independent: a fifth of the test part is the same.
    both = set(found[0]["test"]) & set(found[2]["test"])
    assert len(both) == pytest.approx(120, abs=40)


@pytest.mark.parametrize("form", ["number", "text", "timestamp"])
def test_split_by_time_puts_last_rows_into_test_part(tmp_path, run_prepare, form):
    # A permutation of the hours.
    hours = [7 * i % 2_000 for i in range(2_000)]
    begin = datetime.datetime(2024, 1, 31)
    times = [begin + datetime.timedelta(hours=hour) for hour in hours]
    schema = parse_schema({**SCHEMA, "time": "time"})
    if form == "timestamp":
        path = tmp_path / "a.parquet"
        schema = parse_schema({"label": "click", "keys": ["row"], "time": "time"})
        columns = {"click": [i % 2 for i in range(2_000)], "row": range(2_000), "time": times}
        pq.write_table(pa.table({name: list(v) for name, v in columns.items()}), path)
    else:
        path = write(tmp_path / "a.csv", range(2_000), hours if form == "number" else times)
    split = Split("time", test_fraction=0.25, valid_fraction=0.05)
    statistics = run_prepare(path, tmp_path / "out", schema=schema, shard_rows=300, split=split)
    start = "1500" if form == "number" else "2024-04-02 12:00:00 (UTC)"
    described = describe_test_part(split, statistics, False, "time")
    assert described == f"the last lines by the column 'time', from {start} on"
    found = parts_of(tmp_path / "out")
    assert found["train"] == [i for i in range(2_000) if hours[i] < 1_400]
    assert found["valid"] == [i for i in range(2_000) if 1_400 <= hours[i] < 1_500]
    assert found["test"] == [i for i in range(2_000) if hours[i] >= 1_500]
    columns = pq.read_schema(tmp_path / "out" / "train" / "000000.parquet").names
    assert columns == ["click", "row"]


@pytest.mark.parametrize("form", ["csv", "json", "parquet", "partition"])
def test_limits_by_time_need_the_time_column_only(tmp_path, monkeypatch, form):
    columns = {"click": [i % 2 for i in range(100)], "row": range(100), "time": range(100)}
    path = tmp_path / f"a.{form}"
    if form == "csv":
        write(path, columns["row"], columns["time"])
    elif form == "json":
        path.write_text("".join(f'{{"click": 1, "row": 2, "time": {i}}}\n' for i in range(100)))
    else:
        if form == "partition":
            path = tmp_path / "time=7" / "a.parquet"
            path.parent.mkdir()
            del columns["time"]
        pq.write_table(pa.table({name: list(v) for name, v in columns.items()}), path)
    schema = parse_schema({"label": "click", "keys": ["row"], "time": "time"})
    source, _ = open_source([str(path)], form.replace("partition", "parquet"), schema)
    monkeypatch.setattr(source, "parse", None)
    if form == "partition":
        with pytest.raises(ValueError, match="too many have the time 7"):
            find_limits(Split("time"), source, threads=2)
    else:
        limits = find_limits(Split("time"), source, threads=2)
        assert limits == {"test_from": 90.0, "valid_from": 90.0}


def test_time_may_be_a_key_and_malformed_times_are_counted(tmp_path, run_prepare):
    times = [f"2024-01-{1 + i % 20:02d}" for i in range(1_000)]
    times[3], times[14] = "", "yesterday"
    path = write(tmp_path / "a.csv", range(1_000), times)
    schema = parse_schema({**SCHEMA, "keys": [*SCHEMA["keys"], "time"], "time": "time"})
    statistics = run_prepare(path, tmp_path / "out", schema=schema, split=Split("time"))
    assert statistics["bad_lines"] == 2 and list(statistics["fields"]) == ["row", "time"]
    reasons = statistics["bad_reasons"]
    assert list(reasons) == ["time is malformed; expected a number, or a date and time as in "
                             "ISO 8601, such as 2024-01-31 12:00"]  # fmt: skip
    assert {i % 20 for i in parts_of(tmp_path / "out")["test"]} == {18, 19}


def test_column_that_is_no_time_raises(tmp_path):
    columns = {"click": [0, 1], "row": [1, 2], "time": [[1], [2]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    schema = parse_schema({"label": "click", "keys": ["row"], "time": "time"})
    with pytest.raises(ValueError, match=r"'time' has the type list.*for the column `time`"):
        open_source([str(tmp_path / "a.parquet")], "auto", schema)


def test_equal_times_cannot_be_divided(tmp_path, run_prepare):
    path = write(tmp_path / "a.csv", range(100), [5] * 100)
    schema = parse_schema({**SCHEMA, "time": "time"})
    with pytest.raises(ValueError, match="too many have the time 5 and the training part would be"):
        run_prepare(path, tmp_path / "out", schema=schema, split=Split("time"))


@pytest.mark.parametrize(
    ("times", "valid_fraction", "named"),
    [
        # 30% of the rows have the last time, and the validation part would begin there.
        ([0] * 70 + [7] * 30, 0.2, "valid part .* 30 of 100 rows have the time 7, at which"),
        ([*range(4)], 0.0, "test part .* the fraction 0.1 of 4 rows is too small"),
        ([*range(100)], 0.001, "valid part .* the fraction 0.001 of 100 rows is too small"),
    ],
)
def test_empty_part_by_time_raises(tmp_path, run_prepare, times, valid_fraction, named):
    path = write(tmp_path / "a.csv", range(len(times)), times)
    options = {
        "schema": parse_schema({**SCHEMA, "time": "time"}),
        "split": Split("time", valid_fraction=valid_fraction),
    }
    with pytest.raises(ValueError, match=named):
        run_prepare(path, tmp_path / "out", **options)


def test_own_files_are_whole_parts(tmp_path):
    paths = [
        write(tmp_path / f"{name}.csv", range(first, first + 50))
        for name, first in (("train", 0), ("valid", 50), ("test", 100))
    ]
    source, files = open_source(list(map(str, paths)), "auto", parse_schema(SCHEMA))
    split = Split(file_parts=("train", "valid", "test"))
    prepare(source, files, str(tmp_path / "out"), Options(split=split))
    parts = parts_of(tmp_path / "out")
    assert parts == {
        "train": list(range(50)), "valid": list(range(50, 100)), "test": list(range(100, 150)),
    }  # fmt: skip
    for part, rows in parts.items():
        assert keys_of(tmp_path / "out", part) == rows
    # Without an own test file, the first file is divided.
    source, files = open_source(list(map(str, paths[:2])), "auto", parse_schema(SCHEMA))
    prepare(source, files, str(tmp_path / "b"), Options(split=Split(file_parts=(None, "valid"))))
    assert parts_of(tmp_path / "b")["test"] == [9, 19, 29, 39, 49]
    assert parts_of(tmp_path / "b")["valid"] == list(range(50, 100))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kind": "hash"}, "kind"),
        ({"seed": -1}, "seed"),
        ({"test_fraction": 1.5}, "test_fraction"),
        ({"test_fraction": 0.5, "valid_fraction": 0.5}, "a sum below 1"),
    ],
)
def test_invalid_split_raises(arguments, named):
    with pytest.raises(ValueError, match=named):
        Split(**arguments)
