"""Tests that exported models read the columns of users' files as `slipstream-prepare` does."""

from __future__ import annotations

import csv
import json

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.data.opening import open_source
from slipstream_tf.data.preparation import prepare
from slipstream_tf.data.readers.hashing import keys_of_ids
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.schema import parse_schema
from slipstream_tf.export.columns import MISSING_INTEGER, RawColumns

COUNT = 400


def prepared(tmp_path, path, schema):
    """Prepares a file; returns the folder."""
    source, files = open_source([str(path)], "auto", parse_schema(schema))
    folder = str(tmp_path / "prepared")
    prepare(source, files, folder)
    return folder


def read(folder):
    """Returns the features of all rows in the order of the file, by the dense column "row"."""
    ((features, _),) = list(PreparedReader(folder, COUNT).dataset())
    order = np.argsort(features["dense"][:, -1])
    return tf.nest.map_structure(lambda values: tf.gather(values, order), features)


def write_csv(path, columns):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def tensors_of(raw, columns):
    """Converts the columns of a CSV file to the inputs of a SavedModel."""
    inputs = {}
    for name, spec in raw.signature.items():
        values = list(columns[name])
        if spec.dtype == tf.int64:
            ids = [
                MISSING_INTEGER if value in ("", "NA") else int(value.removesuffix(".0"))
                for value in values
            ]
            values = np.array([i % 2**64 for i in ids], np.uint64).view(np.int64)
        elif spec.dtype == tf.float32:
            values = [np.nan if value in ("", "NA") else float(value) for value in values]
        inputs[name] = tf.constant(values, spec.dtype)
    return inputs


def assert_equal_features(ours, theirs):
    assert set(ours) == set(theirs)
    if "dense" in theirs:
        np.testing.assert_array_equal(ours["dense"], theirs["dense"])
    keys, expected = ours["keys"], theirs["keys"]
    if not isinstance(expected, dict):
        keys, expected = {"": keys}, {"": expected}
    assert list(keys) == list(expected)
    for name, values in expected.items():
        assert type(keys[name]) is type(values)
        if isinstance(values, tf.RaggedTensor):
            assert keys[name].to_list() == values.to_list()
        else:
            np.testing.assert_array_equal(keys[name], values)


def texts_of_file():
    """Returns columns of a CSV file with all kinds of values."""
    draw = np.random.default_rng(0)

    def chosen(*values):
        return [values[i] for i in draw.integers(0, len(values), COUNT)]

    words = ["", "NA", "anna", "é✓", "-1", " a ", "a;b", "x" * 300, "0"]
    integers = [
        "",
        "NA",
        "0",
        "12.0",
        "-7",
        "007",
        "-1",
        "-2",
        str(2**63 - 1),
        str(2**64 - 1),
        str(1 - 2**63),
    ]
    hexes = ["", "NA", "0", "ff", "FF", "0a0B", "fffffffffffffff"]

    def bags(values, separator):
        return [separator.join(chosen(*values)[: i % 4 + 1]) for i in range(COUNT)]

    return {
        "y": chosen("0", "1"),
        "user": chosen(*words),
        "ad": chosen(*integers),
        "site": chosen(*hexes),
        "tags": bags(words, "||"),
        "sizes": bags(integers, " "),
        "pages": bags(hexes, ";"),
        "price": chosen("", "NA", "0", "-3", "0.1", "1e-3", "123456.789", "16777217"),
        "age": chosen("", "NA", "0", "-1", "0.1", "33"),
        "row": list(range(COUNT)),
    }


SCHEMA = {
    "label": "y",
    "keys": [
        "user",
        {"column": "ad", "as": "integer"},
        {"column": "site", "as": "hex"},
        {"column": "tags", "separator": "||"},
        {"column": "sizes", "as": "integer", "separator": " "},
        {"column": "pages", "as": "hex", "separator": ";"},
    ],
    "dense": [{"column": "price", "transform": "log"}, "age", "row"],
    # One of the missing texts contains a separator.
    "missing": ["", "NA", "anna||0"],
}


@pytest.mark.parametrize("bags", [True, False])
def test_columns_of_csv_file_equal_prepared_data(bags, tmp_path):
    columns = texts_of_file()
    columns["tags"][:3] = ["anna||0", "anna||0||0", ""]
    write_csv(tmp_path / "a.csv", columns)
    schema = SCHEMA if bags else {**SCHEMA, "keys": SCHEMA["keys"][:3]}
    folder = prepared(tmp_path, tmp_path / "a.csv", schema)
    raw = RawColumns(folder)
    assert raw.signature["ad"].dtype == tf.int64 and raw.signature["site"].dtype == tf.string
    convert = tf.function(raw.features, input_signature=[raw.signature])
    features = convert(tensors_of(raw, columns))
    assert_equal_features(features, read(folder))
    empty = convert({name: values[:0] for name, values in tensors_of(raw, columns).items()})
    assert tf.nest.flatten(empty["keys"])[0].shape[0] == 0


def test_empty_text_is_a_key_unless_it_is_missing(tmp_path):
    columns = {"y": ["0", "1", "1"], "t": ["a||", "", "NA"], "row": [0, 1, 2]}
    write_csv(tmp_path / "a.csv", columns)
    keys = [{"column": "t", "separator": "|"}]
    schema = {"label": "y", "keys": keys, "dense": ["row"], "missing": ["NA"]}
    folder = prepared(tmp_path, tmp_path / "a.csv", schema)
    raw = RawColumns(folder)
    features = raw.features(tensors_of(raw, columns))
    assert features["keys"]["t"].row_lengths().numpy().tolist() == [3, 1, 0]
    assert_equal_features(features, read(folder))


def test_numbers_of_missing_texts_are_missing(tmp_path):
    ids = ["0", "-999", "", "7", "-1", "18446744073709551614"]
    numbers = ["-999", "0", "", "0.1", "1", "-0.1"]
    columns = {
        "y": ["0.0", "1"] * 3,
        "u": ids,
        "d": numbers,
        "l": numbers,
        "row": list(range(1, 7)),
    }
    write_csv(tmp_path / "a.csv", columns)
    keys = [{"column": "u", "as": "integer"}]
    dense = ["d", {"column": "l", "transform": "log"}, "row"]
    missing = ["", "0", "-999", "0.1", "18446744073709551614", "NA"]
    schema = {"label": "y", "keys": keys, "dense": dense, "missing": missing}
    folder = prepared(tmp_path, tmp_path / "a.csv", schema)
    values = [int(text or -(2**63)) % 2**64 for text in ids]
    inputs = {
        "u": tf.constant(np.array(values, np.uint64).view(np.int64)),
        "row": tf.range(1.0, 7.0),
        **{name: tf.constant([float(text or "nan") for text in numbers]) for name in ("d", "l")},
    }
    features = RawColumns(folder).features(inputs)
    moved = keys_of_ids(np.array([-1]))[0]
    np.testing.assert_array_equal(features["keys"][:, 0], [-2, -2, -2, 7, moved, -2])
    np.testing.assert_array_equal(np.isnan(features["dense"][:, 0]), [1, 1, 1, 1, 0, 0])
    assert_equal_features(features, read(folder))


def test_numbers_in_parquet_file_are_not_missing_texts(tmp_path):
    columns = {"y": [0.0, 1.0], "u": [0, 7], "d": [-999.0, 1.0], "row": [1.0, 2.0]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    schema = {"label": "y", "keys": ["u"], "dense": ["d", "row"], "missing": ["0", "-999"]}
    folder = prepared(tmp_path, tmp_path / "a.parquet", schema)
    inputs = {name: tf.constant(columns[name], tf.float32) for name in ("d", "row")}
    features = RawColumns(folder).features({**inputs, "u": tf.constant([0, 7], tf.int64)})
    np.testing.assert_array_equal(features["keys"], [[0], [7]])
    assert_equal_features(features, read(folder))


@pytest.mark.parametrize(
    ("dtype", "named"), [("int64", ""), ("uint64", " .9223372036854775808 of")]
)
def test_id_that_means_missing_in_requests_is_refused(tmp_path, dtype, named):
    ids = np.array([5, 1 << 63], np.uint64).view(dtype)
    pq.write_table(pa.table({"y": [0.0, 1.0], "u": ids, "row": [1.0, 2.0]}), tmp_path / "a.parquet")
    folder = prepared(tmp_path, tmp_path / "a.parquet", {"label": "y", "keys": ["u"]})
    with pytest.raises(ValueError, match=f"'u' contains the id -9223372036854775808{named}"):
        RawColumns(folder)


def test_columns_of_parquet_file_equal_prepared_data(tmp_path):
    columns = {
        "y": pa.array([1.0, 0.0, 1.0, 0.0]),
        "word": pa.array(["a", None, "NA", "b"]),
        "code": pa.array(["x", "y", "x", "NA"]).dictionary_encode(),
        "small": pa.array([-1, None, -2, 7], pa.int16()),
        "large": pa.array([2**64 - 5, 1, None, 0], pa.uint64()),
        "flag": pa.array([True, False, None, True]),
        "day": pa.array([3, None, 4, -2], pa.date32()),
        "texts": pa.array([["a", "NA"], None, ["", "b"], [None]]),
        "numbers": pa.array([[3, None], None, [], [4, 5, 6]], pa.large_list(pa.int32())),
        "split": pa.array(["a|b", None, "NA", "b|"]),
        "n": pa.array([1.5, None, 3.0, float("nan")], pa.float64()),
        "row": pa.array([0, 1, 2, 3]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    keys = ["word", "code", "small", "large", "flag", "day", "texts", "numbers"]
    keys.append({"column": "split", "separator": "|"})
    schema = {"label": "y", "keys": keys, "dense": ["n", "row"], "missing": ["", "NA"]}
    folder = prepared(tmp_path, tmp_path / "a.parquet", schema)
    raw, missing = RawColumns(folder), MISSING_INTEGER
    features = raw.features(
        {
            "word": tf.constant(["a", "", "NA", "b"]),
            "code": tf.constant(["x", "y", "x", "NA"]),
            "small": tf.constant([-1, missing, -2, 7], tf.int64),
            "large": tf.constant([2**64 - 5, 1, 2**63, 0], tf.uint64),
            "flag": tf.constant([1, 0, missing, 1], tf.int64),
            "day": tf.constant([3, missing, 4, -2], tf.int64),
            "texts": tf.ragged.constant([["a", "NA"], [], ["", "b"], []]),
            "numbers": tf.ragged.constant([[3, missing], [], [], [4, 5, 6]], tf.int64),
            "split": tf.constant(["a|b", "", "NA", "b|"]),
            "n": tf.constant([1.5, np.nan, 3.0, np.nan]),
            "row": tf.range(4.0),
        }
    )
    assert_equal_features(features, read(folder))
    lengths = {name: features["keys"][name].row_lengths() for name in ("texts", "numbers", "split")}
    assert {name: values.numpy().tolist() for name, values in lengths.items()} == {
        "texts": [1, 0, 1, 0],
        "numbers": [1, 0, 0, 3],
        "split": [2, 0, 0, 1],
    }
    kinds = {name: type(spec) for name, spec in raw.signature.items()}
    assert kinds["texts"] is kinds["numbers"] is tf.RaggedTensorSpec
    assert kinds["split"] is kinds["large"] is tf.TensorSpec


def test_columns_of_json_lines_equal_prepared_data(tmp_path):
    records = [
        {"y": 1, "user": 12, "tags": ["a", 5, ""], "ad": 7, "row": 0},
        {"y": 0, "user": None, "tags": [], "ad": None, "row": 1},
        {"y": 1, "user": True, "tags": ["b"], "ad": "-1", "row": 2},
        {"y": 0, "user": 3, "tags": None, "ad": 1, "row": 3},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    keys = ["user", "tags", {"column": "ad", "as": "integer"}]
    schema = {"label": "y", "keys": keys, "dense": ["row"]}
    folder = prepared(tmp_path, tmp_path / "a.jsonl", schema)
    inputs = {
        "user": tf.constant(["12", "", "true", "3"]),
        "tags": tf.ragged.constant([["a", "5", ""], [], ["b"], []]),
        "ad": tf.constant([7, MISSING_INTEGER, -1, 1], tf.int64),
        "row": tf.range(4.0),
    }
    assert_equal_features(RawColumns(folder).features(inputs), read(folder))


def test_din_serves_histories_of_csv_file(tmp_path):
    draw = np.random.default_rng(0)
    items = [f"item {i}" for i in draw.integers(0, 9, COUNT)]
    history = ["|".join(items[max(0, i - i % 4) : i]) for i in range(COUNT)]
    row = list(range(COUNT))
    columns = {"y": draw.integers(0, 2, COUNT), "item": items, "seen": history, "row": row}
    write_csv(tmp_path / "a.csv", columns)
    keys = ["item", {"column": "seen", "separator": "|"}]
    dense = [{"column": "row", "transform": "log"}]
    folder = prepared(tmp_path, tmp_path / "a.csv", {"label": "y", "keys": keys, "dense": dense})
    table = slip.Table("item", 4)
    specs = [slip.FeatureSpec("item", "item"), slip.FeatureSpec("seen", "item", combiner=None)]
    layer = slip.keras.EmbeddingCollection([table], "adagrad", features=specs)
    keras.utils.set_random_seed(0)
    model = slip.models.DIN(layer, 1, history={"seen": "item"}, attention=[4], deep=[4])
    model.compile("adam", "binary_crossentropy")
    model.fit(PreparedReader(folder, 100).dataset(), verbose=0)
    slip.export.saved_model(model, tmp_path / "served", prepared=folder)
    served = tf.saved_model.load(str(tmp_path / "served")).signatures["serving_default"]
    inputs = {name: tf.constant(columns[name]) for name in ("item", "seen")}
    outputs = served(**inputs, row=tf.constant(row, tf.float32))["outputs"]
    np.testing.assert_allclose(outputs, model(read(folder)), atol=1e-6)


def test_text_that_is_no_number_raises(tmp_path):
    (tmp_path / "a.csv").write_text("y,sizes\n" + "1,1 2\n0,3\n" * 9)
    keys = [{"column": "sizes", "as": "integer", "separator": " "}]
    raw = RawColumns(prepared(tmp_path, tmp_path / "a.csv", {"label": "y", "keys": keys}))
    wrong = ("1 x", "1  2 0x1", "12345678901234567890123", "99999999999999999999")
    for text in (*wrong, str(2**64), "1 " + str(-(2**63) - 1), "-9999999999999999999"):
        expected = r"column 'sizes'.*an integer of int64 or uint64"
        with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
            raw.features({"sizes": tf.constant(["5", text])})
    numbers = [0, 2**64 - 1, 2**63, 2**63 - 1, 10**19, 10**10, -(2**63), 1 - 2**63, -(10**10), -10]
    keys = raw.features({"sizes": tf.constant([" ".join(map(str, numbers))])})["keys"]["sizes"]
    ids = np.array([number % 2**64 for number in numbers], np.uint64).view(np.int64)
    np.testing.assert_array_equal(keys.flat_values, keys_of_ids(ids))


def test_invalid_prepared_folder_raises(tmp_path):
    (tmp_path / "a.csv").write_text("y,user\n" + "1,a\n0,b\n" * 9)
    folder = prepared(tmp_path, tmp_path / "a.csv", {"label": "y", "keys": ["user"]})
    layer = slip.keras.EmbeddingCollection([slip.Table("user", 4)])
    spec = tf.TensorSpec([None], tf.string)
    with pytest.raises(ValueError, match=r"`signature`.*with `prepared`\. Expected None"):
        slip.export.saved_model(layer, tmp_path / "1", signature={"user": spec}, prepared=folder)
    with pytest.raises(ValueError, match=r"`prepared`.*wrote with --schema"):
        slip.export.saved_model(layer, tmp_path / "1", prepared=tmp_path)
    path = tmp_path / "prepared" / "prepared.json"
    whole = path.read_text()
    for damage, wrong in (
        (lambda manifest: manifest["columns"].pop("key_types"), "key_types` is None"),
        (lambda manifest: manifest["columns"].update(key_types=["x"]), r"key_types` is \['x'\]"),
        (lambda manifest: manifest["source"]["schema"].pop("missing"), "missing` is None"),
        (lambda manifest: manifest["source"]["schema"]["keys"][0].pop("kind"), "kind` is None"),
    ):
        manifest = json.loads(whole)
        damage(manifest)
        path.write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=rf"damaged.*`{wrong}.*slipstream-prepare --overwrite"):
            RawColumns(folder)
