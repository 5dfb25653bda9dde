"""features["id"] of the readers: the same input has the same number in every order and pass."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream_tf.inputs import DataSpec
from slipstream_tf.inputs.readers import registry
from slipstream_tf.inputs.readers.arrays import ArrayReader
from slipstream_tf.inputs.readers.avazu import HEADER, AvazuReader
from slipstream_tf.inputs.readers.criteo import CriteoReader
from slipstream_tf.inputs.readers.frappe import FIELDS, FrappeReader
from slipstream_tf.inputs.readers.generator import GeneratedReader
from slipstream_tf.inputs.readers.parquet import ParquetReader


def collect(reader):
    """Returns (ids [n], keys [n, fields], batch sizes) of one pass."""
    batches = list(reader.dataset())
    for features, label in batches:
        assert features["id"].shape == label.shape
    ids = np.concatenate([features["id"].numpy() for features, _ in batches])
    assert ids.dtype == np.int64
    keys = np.concatenate([features["keys"].numpy() for features, _ in batches])
    return ids, keys, [len(label) for _, label in batches]


def test_without_the_option_batches_are_as_before():
    for reader in (GeneratedReader(10, "train", 5), array_reader(5)):
        assert "id" not in reader.dataset().element_spec[0]


def array_reader(batch_size, count=1003, **options):
    keys = np.arange(count)[:, None]
    spec = DataSpec("x", ("a",), 0, count)
    return ArrayReader(spec, keys, np.zeros(count), batch_size, **options)


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("shuffle_seed", [None, 5])
@pytest.mark.parametrize("batch_size", [3, 64, 2000])
def test_rows_of_arrays(batch_size, shuffle_seed, drop_remainder):
    options = {"shuffle_seed": shuffle_seed, "drop_remainder": drop_remainder}
    count = 1003 if batch_size == 64 else 2000
    reader = array_reader(batch_size, count, ids=True, **options)
    passes = [collect(reader) for _ in range(2)]
    for ids, keys, _ in passes:
        np.testing.assert_array_equal(ids, keys[:, 0])
        assert len(set(ids)) == (count // batch_size * batch_size if drop_remainder else count)
    if shuffle_seed is not None:
        assert passes[0][0].tolist() != passes[1][0].tolist()
    shape = reader.dataset().element_spec[0]["id"].shape.as_list()
    assert shape == [batch_size if drop_remainder else None]


def test_named_array_sets_take_the_option(tmp_path):
    path = tmp_path / "frappe.npz"
    keys = np.arange(50 * len(FIELDS)).reshape(50, len(FIELDS))
    np.savez(path, train_x=keys, train_y=np.zeros(50), test_x=keys, test_y=np.zeros(50))
    for reader in (
        FrappeReader(path, 8, shuffle_seed=1, ids=True),
        registry.open_data(path, "train", 8, ids=True),
    ):
        ids, read_keys, _ = collect(reader)
        np.testing.assert_array_equal(ids, read_keys[:, 0] // len(FIELDS))
        assert sorted(ids) == list(range(50))


def criteo_line(number):
    return "\t".join(["1", *["3"] * 13, f"{number:08x}", *["0000000a"] * 25])


def write_text(path, first, count, bad=(), header=None):
    lines = [criteo_line(i) if i not in bad else "bad" for i in range(first, first + count)]
    path.write_text("\n".join(lines if header is None else [header, *lines]) + "\n")
    return path


@pytest.mark.parametrize("part", [None, "train", "test"])
def test_numbers_of_data_lines_over_files_parts_and_bad_lines(tmp_path, part):
    bad = {3, 903, 1700, 3204}
    paths = [
        write_text(tmp_path / "a.tsv", 0, 2250, bad),
        write_text(tmp_path / "b.tsv", 2250, 1000, bad),
    ]
    for batch_size in (7, 1000):
        reader = CriteoReader(paths, batch_size, part=part, ids=True)
        for _ in range(2):
            ids, keys, _ = collect(reader)
            np.testing.assert_array_equal(ids, keys[:, 0])
            assert len(set(ids)) == len(ids) and not bad & set(ids.tolist())
        if part is None:
            assert len(ids) == 3250 - len(bad)
    parts = [collect(CriteoReader(paths, 9, part=p, ids=True))[0] for p in ("train", "test")]
    assert sorted(np.concatenate(parts)) == sorted(set(range(3250)) - bad)


def test_exactly_parsed_lines_keep_their_numbers(tmp_path):
    # A short category is read by the exact parser, beside lines that are read fast.
    lines = [criteo_line(0), criteo_line(1).replace("0000000a", "a"), "", criteo_line(3)]
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(lines))
    ids, _, _ = collect(CriteoReader(path, 4, ids=True))
    assert ids.tolist() == [0, 1, 3]
    ids, _, _ = collect(CriteoReader(path, 4, ids=True, max_examples=2))
    assert ids.tolist() == [0, 1]


def test_headers_are_not_counted(tmp_path):
    def line(number):
        return ",".join(["1", "0", "14102105", str(number), *["x"] * 20])

    paths = []
    for name, first in (("a.csv", 0), ("b.csv", 10)):
        lines = [HEADER.decode(), *(line(i) for i in range(first, first + 10))]
        (tmp_path / name).write_text("\n".join(lines))
        paths.append(tmp_path / name)
    ids, _, _ = collect(AvazuReader(paths, 4, ids=True))
    assert ids.tolist() == list(range(20))
    ids, _, _ = collect(registry.open_data(paths[0], "train", 4, ids=True))
    assert ids.tolist() == list(range(10))


def test_generated_inputs_have_running_numbers():
    _, every_key, _ = collect(GeneratedReader(20_000, "train", 20_000, ids=True))
    for reader in (
        GeneratedReader(20_000, "train", 333, ids=True),
        registry.open_data("generated:20000", "train", 512, ids=True),
    ):
        ids, keys, _ = collect(reader)
        np.testing.assert_array_equal(ids, np.arange(20_000))
        np.testing.assert_array_equal(keys, every_key[ids])


@pytest.mark.parametrize("part", [None, "train", "test"])
@pytest.mark.parametrize("batch_size", [9, 5000])
def test_rows_of_parquet_over_files_parts_and_bad_rows(tmp_path, part, batch_size):
    bad = {0, 905, 1600, 2999}
    for name, first in (("a.parquet", 0), ("b.parquet", 1600)):
        row = np.arange(first, first + 1600)
        label = np.where(np.isin(row, list(bad)), np.nan, 0.0)
        table = pa.table({"click": label, "id": row, "id_click_id": row})
        pq.write_table(table, tmp_path / name, row_group_size=77)
    options = {"label": "click", "keys": ["id", "id_click_id"], "ids": True}
    reader = ParquetReader(tmp_path, batch_size, part=part, **options)
    for _ in range(2):
        ids, keys, _ = collect(reader)
        np.testing.assert_array_equal(ids, keys[:, 0])
    parts = [collect(ParquetReader(tmp_path, 50, part=p, **options))[0] for p in ("train", "test")]
    assert sorted(np.concatenate(parts)) == sorted(set(range(3200)) - bad)
    if part is None:
        assert len(ids) == 3200 - len(bad)


def test_parquet_with_lists(tmp_path):
    lists = [list(range(i % 4)) for i in range(50)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"y": np.arange(50) % 2, "bag": lists}), path)
    dataset = ParquetReader(path, 8, label="y", keys=["bag"], ids=True).dataset()
    ids = []
    for features, _ in dataset:
        bag = features["keys"]["bag"].to_list()
        assert bag == [lists[i] for i in features["id"].numpy()]
        ids.extend(features["id"].numpy())
    assert ids == list(range(50))
