"""Tests of schema files: valid entries, and errors naming invalid entries."""

from __future__ import annotations

import json

import pytest

from slipstream_tf.data.schema import DenseColumn, KeyColumn, parse_schema, read_schema

FULL = {
    "label": {"column": "stars", "positive_from": 4},
    "keys": [
        "user",
        {"column": "tags", "separator": "|", "table": "tag"},
        {"column": "ad", "as": "integer"},
    ],
    "dense": ["age", {"column": "price", "transform": "log"}],
    "missing": ["", "NA"],
    "delimiter": "\t",
    "quoting": "none",
    "escape": "\\",
}


def test_schema_with_all_settings_is_parsed(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(FULL))
    schema = read_schema(path)
    assert (schema.label, schema.positive_from) == ("stars", 4)
    assert schema.keys == (
        KeyColumn("user"),
        KeyColumn("tags", separator="|", table="tag"),
        KeyColumn("ad", "integer"),
    )
    assert schema.dense == (DenseColumn("age"), DenseColumn("price", "log"))
    assert (schema.missing, schema.delimiter, schema.columns) == (("", "NA"), "\t", None)
    assert (schema.quoting, schema.escape) == ("none", "\\")
    assert schema.names() == ("stars", "age", "price", "user", "tags", "ad")


def test_minimal_schema_is_parsed():
    schema = parse_schema({"label": "y", "keys": ["a"]})
    assert (schema.missing, schema.delimiter, schema.dense) == (("",), ",", ())
    assert (schema.quoting, schema.escape) == ("double", None)


@pytest.mark.parametrize("delimiter", [";", " ", "::", "¦", "\x1f", ", "])
def test_delimiter_has_one_or_more_characters(delimiter):
    schema = parse_schema({"label": "y", "keys": ["a"], "delimiter": delimiter})
    assert schema.delimiter == delimiter


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"label": None}, "label"),
        ({"label": {"column": "y", "positive_from": "4"}}, "positive_from"),
        ({"label": {"column": "y", "positive": "buy"}}, "positive"),
        ({"label": {"column": "y", "positive": []}}, "positive"),
        ({"label": {"column": "y", "positive": ["1"], "positive_from": 1}}, "either `positive`"),
        ({"keys": []}, "keys"),
        ({"keys": "user"}, "keys"),
        ({"keys": ["user", "user"]}, "each column only once"),
        ({"keys": [{"column": "user", "as": "hash"}]}, "'hash'"),
        ({"keys": [{"name": "user"}]}, "'name'"),
        ({"keys": [{"column": "user", "separator": ""}]}, "separator"),
        ({"keys": [{"column": "user", "table": 1}]}, "table"),
        ({"dense": [{"column": "age", "transform": "log2"}]}, "log2"),
        ({"delimiter": '"'}, "delimiter"),
        ({"delimiter": "\n"}, "delimiter"),
        ({"delimiter": '","'}, "delimiter"),
        ({"delimiter": ":\x1f"}, "delimiter"),
        ({"quoting": "single"}, "'double', 'none'"),
        ({"quoting": None}, "quoting"),
        ({"escape": '"'}, "escape"),
        ({"escape": "\\\\"}, "escape"),
        ({"escape": "\t"}, "escape"),
        ({"escape": ":", "delimiter": "::"}, "escape"),
        ({"missing": "NA"}, "missing"),
        ({"missing": [None]}, "missing"),
        ({"columns": ["stars", "user"]}, "columns"),
        ({"key": ["user"]}, "'key'"),
        ({"separator": ","}, "belongs to a column in `keys`.*between the columns .* `delimiter`"),
        ({"keys": [{"column": "user", "missing": [""]}]}, "`missing` belongs to the schema itself"),
        ({"positive": ["buy"]}, "`positive` belongs to `label`, for example"),
        ({"dense": [{"column": "age", "as": "integer"}]}, "`as` belongs to a column in `keys`"),
    ],
)
def test_schema_errors_name_mistake(change, named):
    with pytest.raises(ValueError, match=named):
        parse_schema({**FULL, **change})


def test_invalid_schema_file_is_named(tmp_path):
    path = tmp_path / "schema.json"
    for content, named in (
        ("{", "not valid JSON"),
        ("[]", "an object"),
        ('{"keys": ["a"]}', "label"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=named) as raised:
            read_schema(path)
        assert str(path) in str(raised.value)
