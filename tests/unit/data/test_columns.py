"""Tests of columns by schema: the keys of `ParquetReader`, and malformed values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream_tf.data.columns import columns_of, convert
from slipstream_tf.data.line_source import CsvSource
from slipstream_tf.data.readers.hashing import hash_string
from slipstream_tf.data.readers.parquet import ParquetReader
from slipstream_tf.data.schema import parse_schema


def parsed(schema, text: str, header: tuple[str, ...]):
    return CsvSource(parse_schema(schema), []).parse_lines(header, text.encode())


def test_text_columns_of_every_kind_are_parsed():
    schema = {
        "label": "y",
        "keys": [
            "user",
            {"column": "ad", "as": "integer"},
            {"column": "site", "as": "hex"},
            {"column": "tags", "separator": "|"},
        ],
        "dense": ["age", {"column": "price", "transform": "log"}],
        "missing": ["", "NA"],
    }
    header = ("age", "user", "y", "unused", "ad", "site", "tags", "price")
    text = "1.5,anna,1,?,-7,ff,x|y,3\nNA,NA,0,?,,,,-1\n2e1,é,1.0,?,9223372036854775807,A,NA|x|,\n"
    result = parsed(schema, text, header)
    assert result.is_good.all() and not result.reasons
    x, y = hash_string(b"x"), hash_string(b"y")
    assert result.table.to_pydict() == {
        "y": [1.0, 0.0, 1.0],
        "age": [1.5, None, 20.0],
        "price": [float(np.float32(np.log(4))), -float(np.float32(np.log(2))), None],
        "user": [hash_string(b"anna"), None, hash_string("é".encode())],
        "ad": [-7, None, 2**63 - 1],
        "site": [255, None, 10],
        "tags": [[x, y], [], [x]],
    }


HEADER = ("y", "k", "n", "l")
SCHEMA = {
    "label": "y",
    "keys": [{"column": "k", "as": "integer"}, {"column": "l", "as": "hex", "separator": " "}],
    "dense": ["n"],
}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("2,1,1,a", "y is '2'; expected 0, 1, true or false. Set in `label` of the schema which"),
        ("-1,1,1,a", "`positive_from` for numbers, for example ratings, or `positive` for texts"),
        ("0.25,1,1,a", "y is '0.25'; expected 0, 1, true or false."),
        (",1,1,a", "y is ''; expected a label, not a missing value"),
        ("nan,1,1,a", "y is 'nan'; expected 0, 1,"),
        ("1,1.5,1,a", "k is '1.5'; expected an integer of int64 or uint64 or a"),
        ("1,.0,1,a", "k is '.0'; expected an integer"),
        ("1,0x1,1,a", "k is '0x1'"),
        ("1,18446744073709551616,1,a", "k is '18446744073709551616'"),
        ("1,-9223372036854775809,1,a", "k is '-9223372036854775809'"),
        ("1,1,inf,a", "n is 'inf'; expected a finite number or a missing value"),
        ("1,1,1e99,a", "n is '1e99'"),
        ('1,1,"0,5",a', "n is '0,5'; expected a number with a decimal point and without commas"),
        ('1,1,"-1.234,5",a', "n is '-1.234,5'; expected a number with a decimal point"),
        ('1,1,"a,b",a', "n is 'a,b'; expected a finite number"),
        ("1,1, 1,a", "n is ' 1'"),
        ("1,1,1_0,a", "n is '1_0'"),
        ("1,1,1,a g", "l is 'a g'; expected 1 to 15 hexadecimal digits or a missing value"),
        ("1,1,1", "3 columns; expected 4, separated by ','"),
        ("1,1,1,a,b", "5 columns"),
        (" ", "1 columns"),
        ('1,1,1,"a', "quoted line break"),
        ("1,1,\r,a", ""),
    ],
)
def test_malformed_line_is_reported_and_other_lines_are_kept(line, named):
    good = "1,{},1.5,a b"
    lines = [good.format(i) for i in range(5)]
    lines.insert(2, line)
    for end in ("\n", "\r\n"):
        result = parsed(SCHEMA, end.join(lines) + end, HEADER)
        assert result.table["k"].to_pylist() == [0, 1, 2, 3, 4]
        assert list(result.reasons) == [2] and named in result.reasons[2]
        assert result.is_good.tolist() == [True, True, False, True, True, True]


def test_quoted_values_contain_delimiters_and_quotes():
    schema = {"label": "y", "keys": ["title"]}
    for bad in ("", 'x,"1\n'):
        text = f'1,"a, ""b"""\n{bad}0,"c"\n'
        result = parsed(schema, text, ("y", "title"))
        assert result.table["title"].to_pylist() == [hash_string(b'a, "b"'), hash_string(b"c")]
        assert bool(result.reasons) == bool(bad)


def test_empty_lines_are_skipped_and_keep_their_numbers():
    schema = {"label": "y", "keys": ["title"]}
    for end in ("\n", "\r\n"):
        lines = ["1,a", "", '0,"b" c', "", "2,d", ""]
        result = parsed(schema, end.join(lines) + end, ("y", "title"))
        assert result.table["title"].to_pylist() == [hash_string(b"a"), hash_string(b"b c")]
        assert result.is_good.tolist() == [True, False, True, False, False, False]
        assert list(result.reasons) == [4] and "y is '2'" in result.reasons[4]


def test_quotes_escapes_and_long_delimiters_are_settings():
    schema = {"label": "y", "keys": ["a", "b"], "quoting": "none", "delimiter": "::"}
    result = parsed(schema, '1::"Big"::7" vinyl\n0::::"\n', ("y", "a", "b"))
    words = [hash_string(word) for word in (b'"Big"', b'7" vinyl', b'"')]
    assert result.table["a"].to_pylist() == [words[0], None]
    assert result.table["b"].to_pylist() == words[1:]
    schema = {"label": "y", "keys": ["a"], "escape": "\\"}
    result = parsed(schema, '1,"Say \\"hi, you\\""\n0,a\\,b\n', ("y", "a"))
    expected = [hash_string(b'Say "hi, you"'), hash_string(b"a,b")]
    assert result.table["a"].to_pylist() == expected


def test_label_is_positive_from_threshold():
    schema = {"label": {"column": "y", "positive_from": 3.5}, "keys": ["k"]}
    result = parsed(schema, "3,a\n3.5,a\n5,a\n-1,a\nx,a\n", ("y", "k"))
    assert result.table["y"].to_pylist() == [0, 1, 1, 0]
    assert "y is 'x'; expected a finite number" in result.reasons[4]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"buy", b"view", b"", None, b"cart", b"Buy"]),
        pa.array(["buy", "view", "", None, "cart", "Buy"]).dictionary_encode(),
        pa.array([7, 1, None, None, -1, 8]),
    ],
)
def test_texts_of_label_are_positive(column):
    positive = ["7", "-1"] if pa.types.is_integer(column.type) else ["buy", "cart"]
    schema = parse_schema({"label": {"column": "y", "positive": positive}, "keys": ["k"]})
    columns_of(schema, {"y": column.type, "k": pa.int64()})
    result = convert(schema, {"y": column, "k": pa.array(range(6))})
    assert result.table["y"].to_pylist() == [1, 0, 1, 0]
    assert list(result.reasons) == [2, 3] and "expected a label" in result.reasons[3]
    assert sorted(result.label_counts.values()) == [1, 1, 1, 1]
    assert set(positive) < set(result.label_counts)


def test_booleans_are_labels():
    result = parsed({"label": "y", "keys": ["k"]}, "True,1\nfalse,2\n0,3\nyes,4\n", ("y", "k"))
    assert result.table["y"].to_pylist() == [1, 0, 0]
    assert "`positive` for texts" in result.reasons[3] and not result.label_counts
    typed = {"y": pa.array([True, False]), "k": pa.array([1, 2])}
    for label in ("y", {"column": "y", "positive": ["true"]}):
        assert convert(parse_schema({"label": label, "keys": ["k"]}), typed).table[
            "y"
        ].to_pylist() == [1, 0]


def test_integers_of_64_bits_are_ids():
    ids = [-(2**63), -2, -1, 0, 2**63 - 1, 2**63, 2**64 - 1]
    schema = {"label": "y", "keys": [{"column": "k", "as": "integer"}]}
    signed = np.array([i % 2**64 for i in ids], np.uint64).view(np.int64)
    for end in ("", ".0", ".000"):
        result = parsed(schema, "".join(f"1,{i}{end}\n" for i in ids), ("y", "k"))
        assert not result.reasons
        assert result.table["k"].to_pylist() == signed.tolist()


def test_typed_columns_equal_parquet_reader(tmp_path):
    table = pa.table(
        {
            "y": pa.array([True, False, None, True]),
            "n": pa.array([1, None, 3, 4], pa.int32()),
            "big": pa.array([2**64 - 5, 1, None, 0], pa.uint64()),
            "word": pa.array(["a", None, "", "b"]).dictionary_encode(),
            "list": pa.array([["a"], None, [], ["b", None]]),
            "numbers": pa.array([[-1, 2], [-2, None], None, []], pa.large_list(pa.int16())),
            "none": pa.array([None, [None], [5], None], pa.list_(pa.float64())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    keys = ["big", "word", "list", "numbers", "none"]
    schema = parse_schema({"label": "y", "dense": ["n"], "keys": keys, "missing": ["no"]})
    types = {field.name: field.type for field in table.schema}
    assert columns_of(schema, types).lists == ("list", "numbers", "none")
    columns = {name: table[name].combine_chunks() for name in schema.names()}
    ours = convert(schema, columns)
    assert list(ours.reasons) == [2]
    pq.write_table(ours.table, tmp_path / "b.parquet")
    (mine, label), (features, expected) = (
        next(iter(ParquetReader(path, 9, label="y", keys=keys, dense=["n"]).dataset()))
        for path in (tmp_path / "b.parquet", tmp_path / "a.parquet")
    )
    assert label.numpy().tolist() == expected.numpy().tolist()
    # `convert` keeps missing numbers, because the reader replaces them later.
    assert ours.table["n"].to_pylist() == [1.0, None, 4.0]
    for name in keys:
        one, other = mine["keys"][name], features["keys"][name]
        of_list = name in ("list", "numbers", "none")
        assert (one.to_list() if of_list else one.numpy().tolist()) == (
            other.to_list() if of_list else other.numpy().tolist()
        )


@pytest.mark.parametrize("kind", ["integer", "hex"])
def test_empty_text_that_is_not_missing_is_malformed(kind):
    keys = [{"column": "k", "as": kind}]
    schema = parse_schema({"label": "y", "keys": keys, "missing": ["NA"]})
    columns = {"y": ["1", "0", "1"], "k": ["7", "", "NA"]}
    arrays = {name: pa.array(values).cast(pa.binary()) for name, values in columns.items()}
    found = convert(schema, arrays)
    assert found.table["k"].to_pylist() == [7, None] and list(found.reasons) == [1]


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"label": "day", "keys": ["k"]}, "'day' has the type date"),
        ({"label": {"column": "n", "positive": ["1"]}, "keys": ["k"]}, "'n' has the type double"),
        ({"label": "k", "keys": ["both"]}, "'both' has the type struct"),
        (
            {"label": "n", "keys": ["text", {"column": "k", "table": "text"}]},
            "'text' and 'k' share the table 'text', but their ids are hashed text and integers",
        ),
        (
            {"label": "n", "keys": [{"column": "k", "as": "hex"}]},
            "Expected text for a key with `as`",
        ),
    ],
)
def test_unsupported_types_raise(schema, named):
    types = {
        "text": pa.string(),
        "day": pa.date32(),
        "k": pa.int64(),
        "n": pa.float64(),
        "both": pa.struct([]),
    }
    with pytest.raises(ValueError, match=named):
        columns_of(parse_schema(schema), types)
