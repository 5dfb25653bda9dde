"""The globo task against a click-by-click reference, and its splits."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from slipstream_tf.inputs.readers import globo
from slipstream_tf.inputs.readers.globo import FIELDS, GloboReader, build_rows

DATA = pathlib.Path(
    os.environ.get("SLIPSTREAM_DATA")
    or pathlib.Path(__file__).resolve().parents[4] / "shared" / "data"
)
CLICKS = 3000


def make_columns(clicks=CLICKS):
    generator = np.random.default_rng(1)
    names = (*FIELDS[:8], "session_size", "session_start")
    columns = {name: generator.integers(0, 50, clicks).astype(np.int32) for name in names}
    # Each click has an article of its own, so that a negative tells the click it came from.
    columns["article"] = generator.permutation(clicks).astype(np.int32)
    columns["click_ts"] = 1_506_826_800 + np.sort(generator.integers(0, 86_400, clicks))
    return columns


@pytest.fixture
def path(tmp_path):
    np.savez(tmp_path / "clicks.npz", **make_columns())
    return tmp_path / "clicks.npz"


def expected_rows(columns, clicks, seed):
    """The task as its description says it, one click at a time."""
    farness = np.random.default_rng(seed).integers(1, 20_001, len(columns["article"]))
    rows = []
    for i in range(clicks):
        row = [int(columns[name][i]) for name in FIELDS[:8]]
        row += [int(columns["click_ts"][i]) // 3600 % 24, min(int(columns["session_size"][i]), 20)]
        negative = list(row)
        negative[1] = int(columns["article"][max(i - int(farness[i]), 0)])
        rows += [(row, 1), (negative, 0)]
    return np.array([row for row, _ in rows]), np.array([label for _, label in rows])


def joined(reader_or_dataset):
    dataset = reader_or_dataset if hasattr(reader_or_dataset, "map") else None
    dataset = reader_or_dataset.dataset() if dataset is None else dataset
    parts = [(f["keys"].numpy(), y.numpy()) for f, y in dataset]
    return np.concatenate([k for k, _ in parts]), np.concatenate([y for _, y in parts])


def test_rows_equal_the_reference():
    columns = make_columns()
    keys, label = build_rows(columns, seed=0)
    assert keys.dtype == np.int32
    expected_keys, expected_label = expected_rows(columns, CLICKS, 0)
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(label, expected_label)


def test_negatives_are_uniform_over_the_clicks_before():
    clicks = 60_000
    columns = dict.fromkeys((*FIELDS[:8], "click_ts", "session_size"), np.zeros(clicks, np.int32))
    columns["article"] = np.arange(clicks, dtype=np.int32)
    keys, _ = build_rows(columns, seed=5)
    farness = (keys[0::2, 1] - keys[1::2, 1])[20_000:]
    assert farness.min() >= 1 and farness.max() <= 20_000
    assert farness.min() < 20 and farness.max() > 19_980
    assert abs(farness.mean() - 10_000.5) < 5 * 20_000 / np.sqrt(12 * len(farness))
    assert keys[1, 1] == 0


def test_time_split_is_the_rows_in_order(path):
    expected_keys, expected_label = expected_rows(make_columns(), CLICKS, 0)
    border = 2 * int(CLICKS * 0.9)
    for part, rows in (("train", slice(0, border)), ("test", slice(border, None))):
        reader = GloboReader(path, 256, part=part, split="time")
        keys, label = joined(reader)
        assert reader.spec.fields == FIELDS and reader.spec.num_examples == len(label)
        np.testing.assert_array_equal(keys, expected_keys[rows])
        np.testing.assert_array_equal(label, expected_label[rows])


def test_random_split_loses_no_row_and_keeps_time(path, monkeypatch):
    monkeypatch.setattr(globo, "RANDOM_SPLIT_ROWS", 4000)
    globo._task.cache_clear()
    columns = {name: values[:2000] for name, values in make_columns().items()}
    expected_keys, expected_label = expected_rows(columns, 2000, 0)
    expected = np.column_stack([expected_keys, expected_label]).tolist()
    parts = {}
    for part, size in (("train", 3600), ("test", 400)):
        keys, label = joined(GloboReader(path, 256, part=part))
        parts[part] = np.column_stack([keys, label.astype(int)]).tolist()
        assert len(label) == size
        # Walking through the rows once finds those of a part one after the other.
        rows = iter(expected)
        assert all(row in rows for row in parts[part])
    assert sorted(parts["train"] + parts["test"]) == sorted(expected)
    globo._task.cache_clear()


@pytest.mark.parametrize("split", ["random", "time"])
@pytest.mark.parametrize("negatives", [1, 3])
def test_a_validation_part_is_a_tenth_of_the_training_part(path, split, negatives):
    def rows(part, **options):
        reader = GloboReader(path, 256, part=part, split=split, negatives=negatives, **options)
        keys, label = joined(reader)
        return np.column_stack([keys, label.astype(int)]).tolist()

    whole, rest, valid = rows("train"), rows("train", hold_out=True), rows("valid")
    assert sorted(whole) == sorted(rest + valid)
    assert abs(len(valid) - 0.1 * len(whole)) <= 1 + negatives
    assert rows("test") == rows("test", hold_out=True)
    if split == "time":
        assert whole == rest + valid


@pytest.mark.parametrize("law", globo.LAWS)
def test_each_click_has_its_negatives(law):
    columns = make_columns()
    columns["article"] = np.arange(CLICKS, dtype=np.int32)  # tells the click
    keys, label = build_rows(columns, 0, negatives=4, law=law)
    keys, label = keys.reshape(CLICKS, 5, -1), label.reshape(CLICKS, 5)
    np.testing.assert_array_equal(label, np.tile([1, 0, 0, 0, 0], (CLICKS, 1)))
    others = [i for i, field in enumerate(FIELDS) if field != "article"]
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


def test_one_negative_is_the_first_of_several_laws(path):
    columns = make_columns()
    one, label = build_rows(columns, 3)
    expected_keys, expected_label = expected_rows(columns, CLICKS, 3)
    np.testing.assert_array_equal(one, expected_keys)
    np.testing.assert_array_equal(label, expected_label)


def test_seeds_and_repetition(path):
    first, _ = joined(GloboReader(path, 100, seed=0))
    globo._task.cache_clear()
    np.testing.assert_array_equal(joined(GloboReader(path, 77, seed=0))[0], first)
    assert not np.array_equal(joined(GloboReader(path, 100, seed=1))[0], first)


def test_parts_share_one_build(path):
    globo._task.cache_clear()
    GloboReader(path, 100, part="train")
    GloboReader(path, 100, part="test")
    assert globo._task.cache_info().misses == 1


def test_shuffling_reorders_each_pass(path):
    plain, _ = joined(GloboReader(path, 100))
    dataset = GloboReader(path, 100, shuffle_seed=1).dataset()
    first, second = joined(dataset)[0], joined(dataset)[0]
    assert not np.array_equal(first, second) and not np.array_equal(first, plain)
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(plain.tolist())
    again = GloboReader(path, 100, shuffle_seed=1).dataset()
    np.testing.assert_array_equal(joined(again)[0], first)
    np.testing.assert_array_equal(joined(again)[0], second)


def test_max_inputs_and_last_batch(path):
    whole, _ = joined(GloboReader(path, 100))
    reader = GloboReader(path, 100, max_examples=250)
    assert [len(y) for _, y in reader.dataset()] == [100, 100, 50]
    assert reader.spec.num_examples == 250
    np.testing.assert_array_equal(joined(reader)[0], whole[:250])
    full = GloboReader(path, 100, max_examples=250, drop_remainder=True)
    assert [len(y) for _, y in full.dataset()] == [100, 100]


def test_errors_name_what_is_wrong(path, tmp_path):
    with pytest.raises(ValueError, match=r"`split`: 'date'.*'random', 'time'"):
        GloboReader(path, 100, split="date")
    with pytest.raises(ValueError, match=r"`part`: 'dev'.*'train', 'valid', 'test'"):
        GloboReader(path, 100, part="dev")
    with pytest.raises(ValueError, match=r"`law`: 'day'.*'before', 'hour'"):
        GloboReader(path, 100, law="day")
    with pytest.raises(ValueError, match="`negatives`: 0"):
        GloboReader(path, 100, negatives=0)
    with pytest.raises(ValueError, match="`max_examples`: 0"):
        GloboReader(path, 100, max_examples=0)
    columns = make_columns()
    del columns["region"]
    np.savez(tmp_path / "part.npz", **columns)
    with pytest.raises(ValueError, match=r"no columns \['region'\]; found"):
        GloboReader(tmp_path / "part.npz", 100)


def test_real_file():
    path = DATA / "globo_clicks.npz"
    if not path.exists():
        pytest.skip(f"no {path}")
    sizes = {"random": (2_700_000, 300_000), "time": (2 * 2_689_362, 2 * 298_819)}
    for split, expected in sizes.items():
        readers = [GloboReader(path, 1024, part=part, split=split) for part in ("train", "test")]
        assert tuple(reader.spec.num_examples for reader in readers) == expected
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in globo._COLUMNS}
    expected_keys, expected_label = expected_rows(columns, 2000, 0)
    keys, label = joined(GloboReader(path, 1024, split="time", max_examples=4000))
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(label, expected_label)
    globo._task.cache_clear()
