"""Prepared research data sets have the expected examples, order and split."""

from __future__ import annotations

import csv
import gzip
import json
import os
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_programs import BENCHMARKS, load, needs_sources, run_benchmark

from slipstream_tf.cli import train
from slipstream_tf.cli.program import run_program
from slipstream_tf.cli.train_flags import make_flags
from slipstream_tf.data.readers.prepared import PreparedReader

pytestmark = needs_sources
DATA = Path(os.environ.get("SLIPSTREAM_DATA") or BENCHMARKS.parents[1] / "shared" / "data")
CLICKS = 3000


@pytest.fixture
def globo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("datasets/globo", monkeypatch)


@pytest.fixture
def frappe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("datasets/frappe", monkeypatch)


@pytest.fixture
def movielens(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("datasets/movielens", monkeypatch)


def make_clicks(clicks: int = CLICKS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    names = ("user", "environment", "device", "os", "country", "region", "referrer")
    columns = {name: random.integers(0, 50, clicks).astype(np.int32) for name in names}
    columns["session_size"] = random.integers(0, 50, clicks).astype(np.int32)
    # Each click has its own article, so that the article of a negative identifies its click.
    columns["article"] = random.permutation(clicks).astype(np.int32)
    columns["click_ts"] = 1_506_826_800 + np.sort(random.integers(0, 86_400, clicks))
    return columns


@pytest.fixture
def clicks(tmp_path: Path) -> str:
    np.savez(tmp_path / "clicks.npz", **make_clicks())
    return str(tmp_path / "clicks.npz")


def expected_examples(
    globo: ModuleType, columns: dict[str, np.ndarray], clicks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the expected keys and labels, computed click by click."""
    distance = np.random.default_rng(0).integers(1, 20_001, len(columns["article"]))
    rows = []
    for i in range(clicks):
        row = [int(columns[name][i]) for name in globo.FIELDS[:8]]
        row += [int(columns["click_ts"][i]) // 3600 % 24, min(int(columns["session_size"][i]), 20)]
        negative = list(row)
        negative[1] = int(columns["article"][max(i - int(distance[i]), 0)])
        rows += [(row, 1), (negative, 0)]
    return np.array([row for row, _ in rows]), np.array([label for _, label in rows])


def parts_of(source: Any) -> dict[str, list[list[int]]]:
    """Returns part -> examples, each a list of keys and a label."""
    return {
        part: np.column_stack([keys, labels.astype(int)]).tolist()
        for part, (keys, labels) in source._parts.items()
    }


def read_globo(globo: ModuleType, path: str, **others: Any) -> dict[str, list[list[int]]]:
    defaults = {flag.name: flag.default or False for flag in globo.FLAGS}
    return parts_of(globo.read(path, **{**defaults, "clicks": None, **others}))


def prepare(program: str, *arguments: object) -> None:
    done = run_benchmark(f"datasets/{program}", *map(str, arguments))
    assert done.returncode == 0, done.stderr


def prepared(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    batches = list(PreparedReader(folder, 64, part).dataset().as_numpy_iterator())
    keys = np.concatenate([features["keys"] for features, _ in batches])
    return keys, np.concatenate([labels for _, labels in batches])


def test_globo_examples_equal_the_reference(globo: ModuleType) -> None:
    columns = make_clicks()
    keys, labels = globo.build_examples(columns, 0, 1, "before")
    expected_keys, expected_labels = expected_examples(globo, columns, CLICKS)
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(labels, expected_labels)


def test_globo_negatives_are_uniform_over_earlier_clicks(globo: ModuleType) -> None:
    clicks = 60_000
    columns = dict.fromkeys(make_clicks(), np.zeros(clicks, np.int32))
    columns["article"] = np.arange(clicks, dtype=np.int32)
    keys, _ = globo.build_examples(columns, 5, 1, "before")
    distance = (keys[0::2, 1] - keys[1::2, 1])[20_000:]
    assert distance.min() >= 1 and distance.max() <= 20_000
    assert distance.min() < 20 and distance.max() > 19_980
    assert abs(distance.mean() - 10_000.5) < 5 * 20_000 / np.sqrt(12 * len(distance))
    assert keys[1, 1] == 0


@pytest.mark.parametrize("law", ["before", "hour"])
def test_globo_adds_negatives_for_each_click(globo: ModuleType, law: str) -> None:
    columns = make_clicks()
    columns["article"] = np.arange(CLICKS, dtype=np.int32)
    keys, labels = globo.build_examples(columns, 0, 4, law)
    keys, labels = keys.reshape(CLICKS, 5, -1), labels.reshape(CLICKS, 5)
    np.testing.assert_array_equal(labels, np.tile([1, 0, 0, 0, 0], (CLICKS, 1)))
    others = [i for i, field in enumerate(globo.FIELDS) if field != "article"]
    assert (keys[:, 1:, others] == keys[:, :1, others]).all()
    clicks, of_negatives = keys[:, :1, 1], keys[:, 1:, 1]
    hour = columns["click_ts"] // 3600
    if law == "hour":
        assert (hour[of_negatives] == hour[:, None]).all()
        sizes = np.unique(hour, return_counts=True)[1]
        assert len(np.unique(of_negatives)) > 0.9 * CLICKS
        assert sizes.min() > 20 and (np.diff(np.sort(of_negatives, 1), axis=1) > 0).mean() > 0.9
    else:
        assert (of_negatives <= clicks).all() and (clicks - of_negatives <= 20_000).all()


def test_globo_time_split_keeps_order(globo: ModuleType, clicks: str) -> None:
    keys, labels = expected_examples(globo, make_clicks(), CLICKS)
    expected = np.column_stack([keys, labels]).tolist()
    border = 2 * int(CLICKS * 0.9)
    parts = read_globo(globo, clicks, split="time")
    assert parts == {"train": expected[:border], "test": expected[border:]}


def test_globo_random_split_keeps_all_examples_and_time_order(
    globo: ModuleType, clicks: str
) -> None:
    columns = {name: values[:2000] for name, values in make_clicks().items()}
    expected = np.column_stack(expected_examples(globo, columns, 2000)).tolist()
    parts = read_globo(globo, clicks, clicks=2000)
    assert {part: len(rows) for part, rows in parts.items()} == {"train": 3600, "test": 400}
    for part in parts.values():
        # `row in rows` advances the iterator, so that this checks the order as well.
        rows = iter(expected)
        assert all(row in rows for row in part)
    assert sorted(parts["train"] + parts["test"]) == sorted(expected)
    assert read_globo(globo, clicks, clicks=2000) == parts
    assert read_globo(globo, clicks, clicks=2000, seed=1) != parts


@pytest.mark.parametrize("split", ["random", "time"])
@pytest.mark.parametrize("negatives", [1, 3])
def test_globo_validation_part_is_tenth_of_training_part(
    globo: ModuleType, clicks: str, split: str, negatives: int
) -> None:
    whole = read_globo(globo, clicks, split=split, negatives=negatives)
    apart = read_globo(globo, clicks, split=split, negatives=negatives, hold_out=True)
    assert sorted(whole["train"]) == sorted(apart["train"] + apart["valid"])
    assert abs(len(apart["valid"]) - 0.1 * len(whole["train"])) <= 1 + negatives
    assert whole["test"] == apart["test"]
    if split == "time":
        assert whole["train"] == apart["train"] + apart["valid"]


def test_globo_trains_with_its_preset_settings(
    globo: ModuleType, clicks: str, tmp_path: Path
) -> None:
    folder, run = tmp_path / "prepared", tmp_path / "run"
    prepare("globo.py", clicks, f"--output={folder}", "--hold_out", "--shard_rows=700")
    for part, expected in read_globo(globo, clicks, hold_out=True).items():
        np.testing.assert_array_equal(np.column_stack(prepared(folder, part)), expected)
    flags = (
        f"--data={folder}", f"--settings={BENCHMARKS / 'datasets' / 'globo.json'}", "--dim=4",
        "--batch_size=128", "--window_steps=5", "--watch", "--evaluate_on=valid",
        f"--output={run}",
    )  # fmt: skip
    assert run_program(train.make_flags(), train.main, flags) == 0
    record = json.loads((run / "metrics.json").read_text())
    assert record["data"] == "globo"
    assert record["examples"]["seen"] == 4860 and record["test"]["examples"] == 540
    settings = record["settings"]
    assert (settings["model"], settings["dim"], settings["rows_init"]) == ("dcn", 4, 0.2)


def test_frappe_keeps_its_validation_part(tmp_path: Path) -> None:
    random, arrays = np.random.default_rng(0), {}
    sizes = {"train": 70, "valid": 20, "test": 10}
    for part, size in sizes.items():
        arrays[f"{part}_x"] = random.integers(0, 5000, (size, 10)).astype(np.int32)
        arrays[f"{part}_y"] = random.integers(0, 2, size).astype(np.int8)
    np.savez(tmp_path / "frappe.npz", **arrays)
    prepare("frappe.py", tmp_path / "frappe.npz", f"--output={tmp_path / 'out'}")
    for part in sizes:
        keys, labels = prepared(tmp_path / "out", part)
        np.testing.assert_array_equal(keys, arrays[f"{part}_x"])
        np.testing.assert_array_equal(labels, arrays[f"{part}_y"])
    reader = PreparedReader(tmp_path / "out", 64, "train", hold_out=True)
    assert reader.spec.name == "frappe" and reader.spec.num_examples == 70


def write_movielens(path: Path, ratings: int) -> None:
    """Writes an archive in the format of ml-1m.zip."""
    users = [f"{u}::{'MF'[u % 2]}::{25 + u % 3}::{u % 20}::{10000 + u}-1234" for u in range(1, 51)]
    lines = [
        f"{1 + i % 50}::{1 + i * 7 % 90}::{1 + i * 3 % 5}::{978_300_000 + 600 * i}"
        for i in range(ratings)
    ]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ml-1m/ratings.dat", "\n".join(lines) + "\n")
        archive.writestr("ml-1m/users.dat", "\n".join(users) + "\n")


def test_movielens_keeps_order_of_its_split(movielens: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "ml-1m.zip"
    write_movielens(path, 3_000)
    keys, labels = movielens.read_archive(str(path))
    # The rating with i = 1: user 2, movie 8, four stars, 978,300,600 s = hour 22.
    assert keys[1].tolist() == [2, 8, 0, 27, 2, 10, 978_300_600 // 3600 % 24]
    assert labels[:5].tolist() == [0, 1, 0, 1, 0]
    order = np.random.default_rng(0).permutation(3_000)
    rows = {"train": order[:2_430], "valid": order[2_430:2_700], "test": order[2_700:]}
    prepare("movielens.py", path, f"--output={tmp_path / 'out'}", "--hold_out", "--shard_rows=500")
    for part, own in rows.items():
        found_keys, found_labels = prepared(tmp_path / "out", part)
        np.testing.assert_array_equal(found_keys, keys[own])
        np.testing.assert_array_equal(found_labels, labels[own])
    prepare("movielens.py", path, f"--output={tmp_path / 'whole'}")
    np.testing.assert_array_equal(prepared(tmp_path / "whole", "train")[0], keys[order[:2_700]])


@pytest.mark.parametrize("name", ["globo", "frappe", "movielens"])
def test_dataset_settings_are_valid_flags(name: str) -> None:
    path = BENCHMARKS / "datasets" / f"{name}.json"
    values, _ = make_flags().parse([f"--settings={path}"])
    assert values["shuffle"] == "examples"


def test_invalid_arrays_raise_with_array_name(
    globo: ModuleType, frappe: ModuleType, clicks: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.npz")
    columns = make_clicks()
    for change, message in (
        ({"user": np.full(CLICKS, 1.5)}, "'user': float64. Expected integers"),
        ({"user": np.full(CLICKS, 1 << 40)}, "'user': 1099511627776. Expected -2147483648"),
        ({"os": np.ones(CLICKS - 1, np.int32)}, r"Expected \[clicks\] for all arrays"),
    ):
        np.savez(path, **{**columns, **change})
        with pytest.raises(ValueError, match=rf"a\.npz.*{message}"):
            read_globo(globo, path)
    good = {f"{part}_x": np.ones((4, 10), int) for part in ("train", "valid", "test")}
    good |= {f"{part}_y": np.ones(4, int) for part in ("train", "valid", "test")}
    for change, message in (
        ({"train_x": np.full((4, 10), 1 << 63, "u8")}, "'train_x': 92233720368547"),
        ({"test_y": np.full(4, 7)}, "'test_y'. Expected 0 or 1"),
        ({"test_y": np.full(4, np.nan)}, "'test_y'. Expected 0 or 1"),
        ({"valid_y": np.ones((4, 1), int)}, "Invalid shapes of the part 'valid'"),
        ({"valid_x": np.ones((4, 9), int)}, "Invalid shapes of the part 'valid'"),
    ):
        np.savez(path, **{**good, **change})
        with pytest.raises(ValueError, match=rf"a\.npz.*{message}"):
            frappe.read(path)
    with pytest.raises(ValueError, match=r"clicks\.npz.*but not \['train_x'"):
        frappe.read(clicks)


@pytest.mark.parametrize("program", ["globo.py", "frappe.py", "movielens.py"])
def test_damaged_file_prints_one_line_error(program: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.zip"
    path.write_bytes(b"PK\x03\x04 no archive")
    done = run_benchmark(f"datasets/{program}", str(path), f"--output={tmp_path / 'out'}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"{program}: Invalid argument DATA: {path} is not"
    )
    done = run_benchmark(f"datasets/{program}", f"--output={tmp_path / 'out'}")
    assert done.returncode == 2 and "Invalid argument DATA" in done.stderr


def real(file: str) -> str:
    if not (DATA / file).exists():
        pytest.skip(f"no {DATA / file}")
    return str(DATA / file)


def test_real_globo_file(globo: ModuleType) -> None:
    path = real("globo_clicks.npz")
    sizes = {"random": (2_700_000, 300_000), "time": (2 * 2_689_362, 2 * 298_819)}
    defaults = {"negatives": 1, "negatives_from": "before", "clicks": None, "hold_out": False}
    for split, expected in sizes.items():
        source = globo.read(path, split=split, seed=0, **defaults)
        assert tuple(len(labels) for _, labels in source._parts.values()) == expected
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in make_clicks(1)}
    keys, labels = source._parts["train"]
    expected_keys, expected_labels = expected_examples(globo, columns, 2000)
    np.testing.assert_array_equal(keys[:4000], expected_keys)
    np.testing.assert_array_equal(labels[:4000], expected_labels)


def test_real_frappe_file(frappe: ModuleType) -> None:
    parts = frappe.read(real("frappe_x1.npz"))._parts
    sizes = {part: len(labels) for part, (_, labels) in parts.items()}
    assert sizes == {"train": 202_027, "valid": 57_722, "test": 28_860}
    assert all(0.3 < labels.mean() < 0.37 for _, labels in parts.values())
    assert len(np.unique(np.concatenate([keys.ravel() for keys, _ in parts.values()]))) <= 5382


def rows_of_public_file(path: Path, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads a text file with the standard library."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    delimiter = schema.get("delimiter", ",")
    with open(path, encoding="latin-1", newline="") as file:
        if len(delimiter) > 1:
            rows = [line.rstrip("\n").split(delimiter) for line in file]
        else:
            rows = list(csv.reader(file, delimiter=delimiter, escapechar=schema.get("escape")))
    names = schema.get("columns") or rows.pop(0)
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_public_formats_have_the_same_counts_as_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = load("public_formats", monkeypatch)
    assert len(formats.FORMATS) == 10
    for name, one in formats.FORMATS.items():
        formats.prepared(name, 300, tmp_path / name)
        schema = one.schema or {}
        rows = rows_of_public_file(tmp_path / name / one.data, schema)
        label, columns, separators = formats.columns_of(name)
        positive = sum(map(formats.is_positive(name), [row[label] for row in rows]))
        expected = {"examples": len(rows), "positive": positive}
        for column in columns:
            texts = [str(row.get(column, "")) for row in rows]
            present = [text for text in texts if text not in schema.get("missing", [""])]
            if column in separators:
                present = [key for text in present for key in text.split(separators[column])]
            expected[f"{column}, missing"] = sum(t in schema.get("missing", [""]) for t in texts)
            expected[f"{column}, distinct"] = len(set(present))
        assert formats.counts_of_prepared(name, tmp_path / name) == expected, name
        assert 280 <= len(rows) <= 300 and 0.05 < positive / len(rows) < 0.9
