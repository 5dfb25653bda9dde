"""Defines the schema of CSV and Parquet files.

A schema names the label, key and dense columns. It is read from a JSON file, for example:

```json
{"label": {"column": "rating", "positive_from": 4},
 "keys": ["user", {"column": "genres", "separator": "|"}, {"column": "ad", "as": "integer"}],
 "dense": [{"column": "price", "transform": "log"}],
 "missing": ["", "NA"], "delimiter": ",", "quoting": "double", "escape": "\\\\"}
```
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from slipstream_tf._utils import disk
from slipstream_tf._utils.errors import invalid, require_choice

TEXT, INTEGER, HEX = "text", "integer", "hex"
STANDARDIZE, LOG, NONE = "standardize", "log", "none"
DOUBLE = "double"
_SETTINGS = (
    *("label", "keys", "dense", "missing", "delimiter", "quoting", "escape", "columns", "time"),
)


_PLACES = {
    **dict.fromkeys(_SETTINGS, "the schema itself"),
    "as": 'a column in `keys`, for example {"column": "ad", "as": "integer"}',
    "separator": 'a column in `keys`, for example {"column": "tags", "separator": "|"}. The text '
    "between the columns of a file is `delimiter`",
    "table": 'a column in `keys`, for example {"column": "clicked", "table": "item"}',
    "transform": 'a column in `dense`, for example {"column": "price", "transform": "log"}',
    "positive_from": '`label`, for example {"column": "stars", "positive_from": 4}',
    "positive": '`label`, for example {"column": "action", "positive": ["buy"]}',
}


@dataclasses.dataclass(frozen=True)
class KeyColumn:
    """Describes a categorical field.

    Attributes:
        column: Name of the column.
        kind: Conversion of text to keys (`"as"` in the file). `"text"` hashes to 64 bits, as
            `ParquetReader` does. `"integer"` and `"hex"` parse the number. Other columns of
            Parquet files are converted by `parquet.to_ids`.
        separator: Separator between the values of a list, or None if the text is one value.
        table: Name of the embedding table, which multiple columns may share. None is a table with
            the name of the column.
    """

    column: str
    kind: str = TEXT
    separator: str | None = None
    table: str | None = None


@dataclasses.dataclass(frozen=True)
class DenseColumn:
    """Describes a column of numbers.

    Attributes:
        column: Name of the column.
        transform: `"standardize"`: models scale the numbers by their mean and standard deviation in
            the training part. `"log"` maps v to `sign(v) * log(1 + |v|)`. `"none"` keeps the
            numbers. Models do not scale the numbers of the latter two.
    """

    column: str
    transform: str = STANDARDIZE


@dataclasses.dataclass(frozen=True)
class Schema:
    """Describes the columns of a data set and its text format.

    Attributes:
        label: Name of the label column.
        keys: The categorical fields, in the order of the key columns.
        dense: The columns of numbers.
        positive_from: Labels of at least this value become 1, smaller labels become 0. None
            requires labels of 0, 1, true or false, or `positive`.
        positive: Texts that become 1; other labels become 0. For columns of integers or booleans,
            the text of the value, for example "2" or "true". Empty if labels are numbers.
        missing: Texts that represent a missing value.
        delimiter: Delimiter of text files, one or more characters.
        quoting: `"double"` if values of text files may be within double quotes, or `"none"` if
            quotes are ordinary characters.
        escape: Character that makes the next character of a text file ordinary, or None.
        columns: Names of all columns, for text files without a header. None reads the names from
            the first line.
        time: Name of the column that orders the rows for `Split("time")`, or None. It contains
            numbers, or dates and times as in ISO 8601, for example "2024-01-31 12:00:00". It may
            also be a key or a dense column.
    """

    label: str
    keys: tuple[KeyColumn, ...]
    dense: tuple[DenseColumn, ...] = ()
    positive_from: float | None = None
    missing: tuple[str, ...] = ("",)
    delimiter: str = ","
    quoting: str = DOUBLE
    escape: str | None = None
    columns: tuple[str, ...] | None = None
    positive: tuple[str, ...] = ()
    time: str | None = None

    def names(self) -> tuple[str, ...]:
        """Returns the names of the used columns: label, dense columns, keys, time."""
        named = (self.label, *(c.column for c in self.dense), *(c.column for c in self.keys))
        return named if self.time is None or self.time in named else (*named, self.time)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-serializable values that identify this schema."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """Reads a schema file.

    Args:
        path: Path of a JSON file. The module docstring contains an example.

    Returns:
        The schema.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not a JSON object, or a setting is unknown, missing or invalid.
    """
    values = disk.read_json(path)
    try:
        return parse_schema(values)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def parse_schema(values: Any) -> Schema:
    """Converts a JSON object to a schema; see `read_schema`."""
    values = _known("schema", values, _SETTINGS, ("label", "keys"))
    label = _entry("label", values["label"], ("column", "positive_from", "positive"))
    positive_from = label.get("positive_from")
    if positive_from is not None:
        is_number = isinstance(positive_from, (int, float)) and not isinstance(positive_from, bool)
        # Rejects infinities, and integers that are too large for a float.
        if not (is_number and abs(positive_from) <= sys.float_info.max):
            raise invalid("positive_from", positive_from, "`label`", "a finite number")
    positive = label.get("positive", [])
    if "positive" in label and not (_is_texts(positive) and positive):
        allowed = 'a list of texts, for example ["buy"]'
        raise invalid("positive", positive, "`label`", allowed)
    if positive and positive_from is not None:
        allowed = "either `positive` for texts or `positive_from` for numbers"
        raise invalid("label", label, "schema", allowed)
    settings = ("column", "as", "separator", "table")
    keys = [_entry("keys", v, settings) for v in _list("keys", values["keys"])]
    dense = [
        _entry("dense", v, ("column", "transform")) for v in _list("dense", values.get("dense", []))
    ]
    if not keys:
        raise invalid("keys", [], "schema", "at least one column")
    for entry in keys:
        require_choice("as", entry.get("as", TEXT), (TEXT, INTEGER, HEX), entry["column"])
        for name in ("separator", "table"):
            if name in entry:
                _text(name, entry[name], entry["column"])
    for entry in dense:
        transform = entry.get("transform", STANDARDIZE)
        require_choice("transform", transform, (STANDARDIZE, LOG, NONE), entry["column"])
    delimiter = _text("delimiter", values.get("delimiter", ","), "schema")
    if any(character in delimiter for character in '"\r\n\0\x1f') and delimiter != "\x1f":
        allowed = "one or more characters such as ',', '\\t' or '::', without '\"' and line ends"
        raise invalid("delimiter", delimiter, "schema", allowed)
    quoting, escape = values.get("quoting", DOUBLE), values.get("escape")
    require_choice("quoting", quoting, (DOUBLE, NONE), "schema")
    if escape is not None:
        _text("escape", escape, "schema")
        is_one = len(escape) == 1 and escape.isascii() and escape.isprintable()
        if not is_one or escape == '"' or escape in delimiter:
            allowed = "one ASCII character such as '\\\\', but not '\"' or part of the delimiter"
            raise invalid("escape", escape, "schema", allowed)
    columns = None
    if values.get("columns") is not None:
        columns = tuple(_text("columns", v, "schema") for v in _list("columns", values["columns"]))
    missing = _list("missing", values.get("missing", [""]))
    if not _is_texts(missing):
        raise invalid("missing", missing, "schema", "a list of strings")
    fields = tuple(
        KeyColumn(v["column"], v.get("as", TEXT), v.get("separator"), v.get("table")) for v in keys
    )
    numbers = tuple(DenseColumn(v["column"], v.get("transform", STANDARDIZE)) for v in dense)
    schema = Schema(
        label["column"],
        fields,
        numbers,
        positive_from=positive_from,
        positive=tuple(positive),
        missing=tuple(missing),
        delimiter=delimiter,
        quoting=quoting,
        escape=escape,
        columns=columns,
    )
    if values.get("time") is not None:
        schema = dataclasses.replace(schema, time=_text("time", values["time"], "schema"))
    _require_columns(schema)
    return schema


def _require_columns(schema: Schema) -> None:
    names = schema.names()
    for name in names:
        if names.count(name) > 1:
            allowed = "each column only once in `label`, `dense` and `keys`"
            raise invalid("column", name, "schema", allowed)
        if schema.columns is not None and schema.columns.count(name) != 1:
            allowed = f"a name that occurs once in `columns`, {list(schema.columns)}"
            raise invalid("column", name, "schema", allowed)


def _known(what: str, values: Any, allowed: tuple[str, ...], needed: tuple[str, ...]) -> Any:
    if not isinstance(values, Mapping):
        kinds = "an object" if what == "schema" else "a column name or an object"
        raise invalid(what, values, "", f"{kinds} with the settings {', '.join(allowed)}")
    for name in values:
        if name not in allowed:
            error = invalid("setting", name, f"`{what}`", f"one of {', '.join(allowed)}")
            place = f" `{name}` belongs to {_PLACES[name]}." if name in _PLACES else ""
            raise ValueError(f"{error}{place}")
    for name in needed:
        if name not in values:
            raise ValueError(
                f"Missing `{name}` in `{what}`. Expected at least {', '.join(needed)}."
            )
    return values


def _entry(setting: str, value: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(value, str):
        value = {"column": value}
    entry = dict(_known(setting, value, allowed, ("column",)))
    _text("column", entry["column"], setting)
    return entry


def _list(setting: str, values: Any) -> Any:
    if not isinstance(values, list):
        raise invalid(setting, values, "schema", "a list")
    return values


def _text(setting: str, value: Any, place: str) -> str:
    if not isinstance(value, str) or not value or not _is_text(value):
        raise invalid(setting, value, place, "a non-empty string")
    return value


def _is_texts(values: Any) -> bool:
    is_list = isinstance(values, list)
    return is_list and all(isinstance(value, str) and _is_text(value) for value in values)


def _is_text(value: str) -> bool:
    """Returns whether a text can be encoded. JSON may contain unpaired surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)
