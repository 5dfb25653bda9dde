"""Tests of the Parquet reader: parts, missing values, lists and malformed rows."""

from __future__ import annotations

import datetime
import decimal
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from slipstream_tf.data.columns import columns_of, convert
from slipstream_tf.data.readers import parquet
from slipstream_tf.data.readers.hashing import hash_string
from slipstream_tf.data.readers.parquet import ParquetReader
from slipstream_tf.data.schema import parse_schema
from slipstream_tf.data.spec import MISSING_KEY, BadLineError


def write(path, row_group_size=1000, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def numbered(path, first, count, **options):
    """Writes a file with a key column "row" that starts at `first`."""
    row = np.arange(first, first + count)
    return write(path, click=(row % 2).astype(np.int8), row=row, price=row * 0.5, **options)


def joined(reader, batches=-1):
    parts = list(reader.dataset().take(batches))
    if not parts:
        return np.zeros((0, len(reader.spec.fields)), np.int64), np.zeros(0, np.float32)
    keys = np.concatenate([features["keys"].numpy() for features, _ in parts])
    return keys, np.concatenate([label.numpy() for _, label in parts])


def test_columns_keep_order(tmp_path):
    path = numbered(tmp_path / "a.parquet", 0, 2500)
    reader = ParquetReader(path, 300, label="click", dense=["price"], keys=["row"])
    assert reader.spec.fields == ("row",) and reader.spec.num_dense == 1
    for _ in range(2):
        batches = list(reader.dataset())
        assert [len(label) for _, label in batches] == [300] * 8 + [100]
        keys = np.concatenate([features["keys"].numpy() for features, _ in batches])
        dense = np.concatenate([features["dense"].numpy() for features, _ in batches])
        label = np.concatenate([label.numpy() for _, label in batches])
        np.testing.assert_array_equal(keys[:, 0], np.arange(2500))
        np.testing.assert_array_equal(dense[:, 0], np.arange(2500) * 0.5)
        np.testing.assert_array_equal(label, np.arange(2500) % 2)
    assert reader.bad_lines.count == 0


def test_element_spec_has_expected_shapes(tmp_path):
    path = numbered(tmp_path / "a.parquet", 0, 100)
    options = {"label": "click", "dense": ["price"], "keys": ["row"]}
    features, label = ParquetReader(path, 30, **options).dataset().element_spec
    assert features["keys"].shape.as_list() == [None, 1]
    assert features["dense"].shape.as_list() == [None, 1]
    assert label.shape.as_list() == [None]


@pytest.mark.parametrize("batch_size", [1, 999, 1000, 50_000])
def test_parts_are_disjoint_and_complete_over_files(tmp_path, batch_size):
    # Files are read in path order, and files that contain no data are skipped.
    numbered(tmp_path / "data" / "b" / "1.parquet", 7500, 4500)
    numbered(tmp_path / "data" / "a.parquet", 0, 7500, row_group_size=333)
    (tmp_path / "data" / "_SUCCESS").touch()
    options = {"label": "click", "keys": ["row"]}
    maximum = 1200 if batch_size == 1 else 12_000
    reader = {
        part: ParquetReader(tmp_path / "data", batch_size, part=part, **options)
        for part in ("train", "test", None)
    }
    rows = np.arange(12_000)
    is_test = rows // 100 % 10 == 9
    expected = {"train": rows[~is_test], "test": rows[is_test], None: rows}
    for part, want in expected.items():
        keys, label = joined(reader[part], -(-maximum // batch_size))
        np.testing.assert_array_equal(keys[:, 0], want[:maximum])
        np.testing.assert_array_equal(label, keys[:, 0] % 2)


def test_batches_span_reads_correctly(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 64)
    path = numbered(tmp_path / "a.parquet", 0, 1000, row_group_size=50)
    for size in (1, 7, 64, 100, 1000, 3000):
        reader = ParquetReader(path, size, label="click", keys=["row"])
        np.testing.assert_array_equal(joined(reader)[0][:, 0], np.arange(1000))


def test_missing_values_have_defaults(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        click=[1, 0, 1],
        age=pa.array([None, 2.5, float("nan")]),
        user=pa.array([7, None, 9], pa.int32()),
        city=pa.array(["x", "", None]),
    )
    options = {"label": "click", "dense": ["age"], "keys": ["user", "city"]}
    features, _ = next(iter(ParquetReader(path, 5, **options).dataset()))
    np.testing.assert_array_equal(features["dense"][:, 0], [np.nan, 2.5, np.nan])
    assert features["keys"].numpy().tolist() == [
        [7, hash_string(b"x")],
        [MISSING_KEY, hash_string(b"")],
        [9, MISSING_KEY],
    ]


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.int8(), pa.uint16(), pa.uint64(), pa.dictionary(pa.int8(), pa.int64())),
        *(pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())),
    ],
)
def test_supported_key_types_are_read(tmp_path, kind):
    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = not pa.types.is_integer(value_type)
    values = ["5", "100", None, "5"] if is_text else [5, 100, None, 5]
    path = write(tmp_path / "a.parquet", click=[0, 1, 0, 1], k=pa.array(values, kind))
    expected = [5, 100, MISSING_KEY, 5]
    if is_text:
        expected = [hash_string(b"5"), hash_string(b"100"), MISSING_KEY, hash_string(b"5")]
    keys, _ = joined(ParquetReader(path, 3, label="click", keys=["k"]))
    assert keys[:, 0].tolist() == expected


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()])
def test_each_integer_has_its_own_key(tmp_path, kind):
    """The ids that a batch reserves for padding and missing values get other keys."""
    is_signed = pa.types.is_signed_integer(kind)
    ids = [-(2**63), -3, -2, -1, 0, 2**63 - 1] if is_signed else [0, 2**63, 2**64 - 2, 2**64 - 1]
    column = pa.array([*ids, None], kind)
    lists = pa.array([[i, None] for i in [*ids, 0]], pa.list_(kind))
    path = write(tmp_path / "a.parquet", click=[1.0] * len(column), k=column, bag=lists)
    keys, _ = joined(ParquetReader(path, 9, label="click", keys=["k"]))
    *known, missing = keys[:, 0].tolist()
    assert missing == MISSING_KEY and len({*known, MISSING_KEY, -1}) == len(ids) + 2
    signed = np.array([i % 2**64 for i in ids], np.uint64).view(np.int64).tolist()
    moved = {-1: hash_string(b"-1"), -2: hash_string(b"-2")}
    assert known == [moved.get(i, i) for i in signed]
    features, _ = next(iter(ParquetReader(path, 9, label="click", keys=["bag"]).dataset()))
    assert features["keys"]["bag"].to_list()[:-1] == [[key] for key in known]


DAY, MOMENT = datetime.date(1970, 1, 4), datetime.datetime(1970, 1, 1, 0, 0, 2)


@pytest.mark.parametrize(
    ("kind", "values", "expected", "malformed"),
    [
        (pa.float64(), [5.0, -3.0, None, math.nan, 2.0**53], [5, -3, None, None, 2**53], 1.5),
        (pa.float32(), [5.0, -0.0], [5, 0], 2.0**60),
        (pa.float64(), [0.0], [0], math.inf),
        (pa.decimal128(22, 2), [7, -(2**63), 2**64 - 3, None], [7, -(2**63), -3, None], 2**64),
        (pa.decimal128(22, 2), [1], [1], decimal.Decimal("1.25")),
        (pa.date32(), [DAY, None], [3, None], None),
        (pa.date64(), [DAY], [3], None),
        (pa.timestamp("s"), [MOMENT, None], [2_000_000, None], None),
        (pa.timestamp("ns", "Europe/Berlin"), [MOMENT], [2_000_000], None),
        (pa.time32("s"), [datetime.time(0, 0, 9)], [9_000_000], None),
        (pa.time64("us"), [datetime.time(0, 0, 9)], [9_000_000], None),
        (pa.duration("ms"), [datetime.timedelta(seconds=9)], [9_000_000], None),
    ],
)
def test_numbers_and_times_are_ids(tmp_path, kind, values, expected, malformed):
    """Malformed ids are skipped and counted, alone and in lists."""
    given = values if malformed is None else [*values, malformed]
    click = [1] * len(given)
    bags = pa.array([[value, value] for value in given], pa.list_(kind))
    path = write(tmp_path / "a.parquet", click=click, k=pa.array(given, kind), bag=bags)
    bags = [[] if key is None else [key, key] for key in expected]
    expected = [MISSING_KEY if key is None else key for key in expected]
    for name, keys in (("k", expected), ("bag", bags)):
        reader = ParquetReader(path, 9, label="click", keys=[name])
        ((features, _),) = list(reader.dataset())
        if name == "k":
            assert features["keys"].numpy()[:, 0].tolist() == keys
        else:
            assert features["keys"]["bag"].to_list() == keys
        assert reader.bad_lines.count == (malformed is not None)
        if malformed is not None:
            assert f":{len(given)}: {name} is " in reader.bad_lines.first
            assert "expected a 64-bit integer" in reader.bad_lines.first
        schema = parse_schema({"label": "click", "keys": [name]})
        table = pq.read_table(path)
        columns_of(schema, {field.name: field.type for field in table.schema})
        columns = {name: table[name].combine_chunks() for name in ("click", name)}
        assert convert(schema, columns).is_good.tolist() == [True] * len(values) + [False] * (
            len(given) - len(values)
        )


@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_list_columns_become_ragged(tmp_path, make):
    tags = [[1, 2], [], None, [3, None], [4], []]
    words = [["a"], None, ["b", "a"], [], None, ["c"]]
    path = write(
        tmp_path / "a.parquet",
        click=[1, 0, 1, 0, 1, 0],
        user=[10, 11, 12, 13, 14, 15],
        tags=pa.array(tags, make(pa.int32())),
        words=pa.array(words, make(pa.string())),
    )
    options = {"label": "click", "keys": ["words", "user", "tags"]}
    for size in (1, 4, 10):
        reader = ParquetReader(path, size, **options)
        got = {"user": [], "tags": [], "words": []}
        for features, label in reader.dataset():
            assert isinstance(features["keys"]["tags"], tf.RaggedTensor)
            assert features["keys"]["tags"].nrows() == len(label)
            for name, values in got.items():
                column = features["keys"][name]
                assert column.dtype == tf.int64
                is_ragged = isinstance(column, tf.RaggedTensor)
                values += column.to_list() if is_ragged else column.numpy().tolist()
        a, b, c = (hash_string(text) for text in (b"a", b"b", b"c"))
        assert got["user"] == [10, 11, 12, 13, 14, 15]
        assert got["tags"] == [[1, 2], [], [], [3], [4], []]
        assert got["words"] == [[a], [], [b, a], [], [], [c]]


def test_fixed_size_lists_are_read(tmp_path):
    values = pa.array([[1, 2], [5, 6], [3, 4]], pa.list_(pa.int64(), 2))
    path = write(tmp_path / "a.parquet", click=[1, 0, 1], pair=values)
    features, _ = next(iter(ParquetReader(path, 5, label="click", keys=["pair"]).dataset()))
    assert features["keys"]["pair"].to_list() == [[1, 2], [5, 6], [3, 4]]


def test_bad_rows_are_counted_and_reported(tmp_path):
    write(tmp_path / "data" / "a.parquet", click=[1.0, 0.0], x=[1.0, 2.0], row=[0, 1])
    last = write(
        tmp_path / "data" / "b.parquet",
        click=pa.array([1.0, None, 0.5, 3.0, 0.0]),
        x=[1.0, 2.0, 3.0, 4.0, 1e300],
        row=[2, 3, 4, 5, 6],
    )
    options = {"label": "click", "dense": ["x"], "keys": ["row"]}
    reader = ParquetReader(tmp_path / "data", 10, **options)
    for _ in range(2):
        assert joined(reader)[0][:, 0].tolist() == [0, 1, 2, 4]
        assert reader.bad_lines.count == 3
        assert reader.bad_lines.first == f"{last}:2: click is None; expected a number from 0 to 1"
    strict = ParquetReader(tmp_path / "data", 10, strict=True, **options)
    with pytest.raises(BadLineError, match=r"b\.parquet:2: click is None"):
        list(strict._batches())


def test_errors_name_file_and_column(tmp_path):
    path = numbered(tmp_path / "a.parquet", 0, 10)
    with pytest.raises(
        ValueError, match=r"the column 'user' is missing.*\['click', 'row', 'price'\]"
    ):
        ParquetReader(path, 5, label="click", keys=["user"])
    both = write(tmp_path / "both.parquet", click=[0, 1], k=[{"a": 1}, {"a": 2}])
    with pytest.raises(ValueError, match=r"'k' has the type struct.*booleans, dates, times, text"):
        ParquetReader(both, 5, label="click", keys=["k"])
    with pytest.raises(ValueError, match=r"`keys`: 'row'.*each column only once"):
        ParquetReader(path, 5, label="row", keys=["row"])
    with pytest.raises(ValueError, match=r"`keys`: 'row'.*a sequence"):
        ParquetReader(path, 5, label="click", keys="row")
    with pytest.raises(ValueError, match=r"`keys`: \(\).*at least one column name"):
        ParquetReader(path, 5, label="click", keys=())
    with pytest.raises(ValueError, match="`part`: 'dev'"):
        ParquetReader(path, 5, label="click", keys=["row"], part="dev")
    text = write(tmp_path / "text.parquet", click=["yes"], row=[1])
    with pytest.raises(ValueError, match="'click' has the type string"):
        ParquetReader(text, 5, label="click", keys=["row"])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet"):
        ParquetReader(tmp_path / "nowhere.parquet", 5, label="click", keys=["row"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty' contains no Parquet files"):
        ParquetReader(tmp_path / "empty", 5, label="click", keys=["row"])
    (tmp_path / "text.txt").write_text("no parquet")
    with pytest.raises(ValueError, match=r"text\.txt"):
        ParquetReader(tmp_path / "text.txt", 5, label="click", keys=["row"])
    numbered(tmp_path / "mixed" / "a.parquet", 0, 10)
    write(tmp_path / "mixed" / "b.parquet", click=[1])
    reader = ParquetReader(tmp_path / "mixed", 5, label="click", keys=["row"])
    with pytest.raises(ValueError, match=r"b\.parquet: the column 'row' is missing"):
        list(reader._batches())


def test_file_without_rows_yields_nothing(tmp_path):
    path = numbered(tmp_path / "a.parquet", 0, 0)
    assert list(ParquetReader(path, 5, label="click", keys=["row"]).dataset()) == []
    path = numbered(tmp_path / "b.parquet", 0, 100)
    assert list(ParquetReader(path, 5, label="click", keys=["row"], part="test").dataset()) == []
