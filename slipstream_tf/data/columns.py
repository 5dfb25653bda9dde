"""Converts Arrow columns to labels, numbers and ids, according to a schema.

Reading the ids with `ParquetReader` gives the same keys as reading the columns themselves.
"""

import collections
import datetime
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf._utils.errors import MAX_SHOWN, shown
from slipstream_tf.data.readers import parquet
from slipstream_tf.data.readers.criteo import transform_count
from slipstream_tf.data.readers.hashing import parse_hex, parse_integers, text_offsets, without
from slipstream_tf.data.schema import HEX, INTEGER, LOG, STANDARDIZE, TEXT, KeyColumn, Schema
from slipstream_tf.data.sources import TIME, Columns, ParsedRows

_NUMBER = re.compile(rb"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9.]*,[0-9.,]+([eE][-+]?[0-9]+)?")
EXACT = {
    HEX: (re.compile(rb"[0-9a-fA-F]{1,15}"), 16),
    INTEGER: (re.compile(rb"[0-9]{1,20}|-[0-9]{1,19}"), 10),
}
"""Per kind of key that is parsed as a number: pattern of the texts and base of the digits.

Integers must also be in the range of int64 or uint64.
"""
_MAX_TEXTS = 1_000  # Maximum number of different texts of a label that are counted in a block.
WHOLE = (r"^(-?[0-9]+)\.0+$", r"\1")
"""Pattern and replacement that write a float as an integer: 12.0 is 12. Columns of pandas become
floats if they have missing values."""
TO_UTF_8 = "iconv --from-code=LATIN1 --to-code=UTF-8"
"""Command that converts a file, for messages."""
_TRUE, _FALSE = [b"true", b"True", b"TRUE"], [b"false", b"False", b"FALSE"]
_MIN_BOOLEAN = min(map(len, _TRUE + _FALSE))
ALLOWED = {
    TEXT: "text",
    HEX: "1 to 15 hexadecimal digits",
    INTEGER: "an integer of int64 or uint64",
}
"""Description of the texts of each kind of key, for errors."""


def columns_of(schema: Schema, types: Mapping[str, pa.DataType]) -> Columns:
    """Returns the columns that `convert` produces; checks the types of its input.

    Args:
        schema: Meaning of the columns.
        types: Type of each column by name. Columns of text files are binary.

    Raises:
        ValueError: If the type of a column does not fit its use.
    """
    label = types[schema.label]
    if schema.positive and not (_is_text_like(label) or parquet.is_integer_or_boolean(label)):
        raise ValueError(
            f"Column {schema.label!r} has the type {label}. Expected text, integers or booleans "
            "for a label with `positive`."
        )
    for name in (schema.label, *(dense.column for dense in schema.dense)):
        if not (_is_text_like(types[name]) or parquet.is_number(types[name])):
            raise ValueError(
                f"Column {name!r} has the type {types[name]}. Expected numbers, booleans, or text "
                "that contains numbers, for a label or dense column."
            )
    if schema.time is not None and not _is_time(types[schema.time]):
        raise ValueError(
            f"Column {schema.time!r} has the type {types[schema.time]}. Expected numbers, "
            "timestamps, dates, or text that contains these, for the column `time`."
        )
    lists = []
    for key in schema.keys:
        kind = types[key.column]
        of_list = parquet.is_list(kind)
        if not parquet.is_key(kind.value_type if of_list else kind):
            raise ValueError(
                f"Column {key.column!r} has the type {kind}. Expected {parquet.KEY_TYPES}."
            )
        if not (_is_text_like(kind) or (key.kind == TEXT and key.separator is None)):
            raise ValueError(
                f"Column {key.column!r} has the type {kind}. Expected text for a key with `as` or "
                "`separator`. Remove these settings from the schema."
            )
        if of_list or key.separator is not None:
            lists.append(key.column)
    dense, fields = (tuple(c.column for c in columns) for columns in (schema.dense, schema.keys))
    tables = tuple(key.table or key.column for key in schema.keys)
    _require_same_ids(schema, types, tables)
    tables = () if tables == fields else tables
    key_types = tuple(_key_type(key, types[key.column]) for key in schema.keys)
    standardize = tuple(c.column for c in schema.dense if c.transform == STANDARDIZE)
    return Columns(schema.label, dense, fields, tuple(lists), tables, key_types, standardize)


def _require_same_ids(
    schema: Schema, types: Mapping[str, pa.DataType], tables: Sequence[str]
) -> None:
    """Raises ValueError if columns share a table, but equal values would have other keys."""
    first: dict[str, tuple[str, str]] = {}
    for key, table in zip(schema.keys, tables, strict=True):
        ids = id_type(key, types[key.column])
        column, expected = first.setdefault(table, (key.column, ids))
        if ids != expected:
            raise ValueError(
                f"Columns {column!r} and {key.column!r} share the table {table!r}, but their ids "
                f"are {expected} and {ids}. Expected columns with the same type of ids."
            )


def id_type(key: KeyColumn, kind: pa.DataType) -> str:
    """Returns the type of the ids of a column. Equal values have equal ids if it is the same."""
    if parquet.is_list(kind):
        kind = kind.value_type
    if _is_text_like(kind):
        return "hashed text" if key.kind == TEXT else "integers"
    is_time = pa.types.is_temporal(kind)
    return str(kind).partition("[")[0] if is_time else "integers"


def _key_type(key: KeyColumn, kind: pa.DataType) -> str:
    """Returns the type of a field for `Columns.key_types`."""
    if parquet.is_list(kind):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if parquet.is_text(kind):
        return "int64" if key.kind == INTEGER and key.separator is None else TEXT
    return "uint64" if pa.types.is_uint64(kind) else "int64"


def convert(schema: Schema, columns: Mapping[str, pa.Array]) -> ParsedRows:
    """Converts the rows of a block to examples.

    A row is malformed if its label is missing or has no meaning, if a dense value is not a number
    or not finite, or if a key cannot be parsed. Missing dense values and missing ids
    become null. Lists contain no missing ids, and a missing list is empty.

    Args:
        schema: Meaning of the columns.
        columns: Arrays [n] of the columns that the schema names.

    Returns:
        The well-formed rows as examples, and the errors of the malformed rows.
    """
    num_rows = len(columns[schema.label])
    reasons: dict[int, str] = {}

    def refuse(name: str, is_bad: np.ndarray, allowed: str) -> None:
        for row in np.flatnonzero(is_bad).tolist():
            value = columns[name][row].as_py()
            if isinstance(value, bytes):
                value = value[:40].decode(errors="backslashreplace")
            expected = allowed
            if "a finite number" in allowed and _DECIMAL_COMMA.fullmatch(str(value)):
                expected = "a number with a decimal point and without commas"
            reasons.setdefault(row, f"{name} is {shown(value)}; expected {expected}")

    text_missing = _encoded(schema.missing)
    texts, is_missing = _label_texts(columns[schema.label], text_missing)
    refuse(schema.label, is_missing, "a label, not a missing value")
    label, allowed = _labels(schema, texts)
    refuse(schema.label, np.isnan(label), allowed)
    result = {schema.label: pa.array(label)}
    for dense in schema.dense:
        values, is_malformed = _numbers(columns[dense.column], text_missing)
        single = _single(values)
        refuse(dense.column, is_malformed | np.isinf(single), "a finite number or a missing value")
        if dense.transform == LOG:
            with np.errstate(invalid="ignore"):
                values = transform_count(single.astype(np.float64))
        result[dense.column] = pa.array(values, from_pandas=True)
    for key in schema.keys:
        keys, is_malformed = _keys(key, columns[key.column], text_missing)
        allowed = ALLOWED[key.kind]
        if not _is_text_like(columns[key.column].type):
            allowed = parquet.ALLOWED_IDS
        refuse(key.column, is_malformed, f"{allowed} or a missing value")
        result[key.column] = keys
    if schema.time is not None:
        moments, is_malformed = _times(columns[schema.time], text_missing)
        allowed = "a number, or a date and time as in ISO 8601, such as 2024-01-31 12:00"
        refuse(schema.time, is_malformed, allowed)
        result[TIME] = pa.array(moments)
    table = pa.table(result)
    is_good = np.ones(num_rows, bool)
    is_good[list(reasons)] = False
    if reasons:
        table = table.filter(pa.array(is_good))
    counts = _counts(texts) if schema.positive else {}
    return ParsedRows(table, is_good, dict(sorted(reasons.items())), counts)


def times(schema: Schema, columns: Mapping[str, pa.Array]) -> np.ndarray:
    """Returns the times of the rows with a well-formed time, float64 [at most n].

    Args:
        schema: Meaning of the columns, with a column `time`.
        columns: The array [n] of the time column, by its name.
    """
    assert schema.time is not None
    found, is_malformed = _times(columns[schema.time], _encoded(schema.missing))
    return found[~is_malformed]


def missing_numbers(missing: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers that represent a missing value in columns of text.

    Args:
        missing: Texts that represent a missing value.

    Returns:
        The texts that `as: integer` reads as ids, int64 [m], and the texts that a dense column
        reads as numbers, float32 [n].
    """
    texts = _encoded(missing)
    none = pa.array([], pa.binary())
    ids, is_malformed = _text_ids(INTEGER, texts)
    numbers = [_single(_numbers(texts[i : i + 1], none)[0]) for i in range(len(texts))]
    found = np.concatenate([np.zeros(0, np.float32), *numbers])
    return ids.to_numpy(zero_copy_only=False)[~is_malformed], found[~np.isnan(found)]


def _is_text_like(kind: pa.DataType) -> bool:
    return parquet.is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _is_time(kind: pa.DataType) -> bool:
    is_moment = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    return is_moment or parquet.is_number(kind) or _is_text_like(kind)


def _as_binary(column: pa.Array, missing: pa.Array) -> pa.Array:
    """Converts text to binary values, with null for missing values."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    column = column.cast(pa.binary())
    if not len(missing):
        return column
    if len(missing) == 1 and missing[0].as_py() == b"":
        is_missing = np.diff(text_offsets(column)) == 0
    else:
        is_missing = pc.is_in(column, value_set=missing).to_numpy(zero_copy_only=False)
    return without(column, is_missing) if is_missing.any() else column


def _label_texts(column: pa.Array, missing: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Returns the label column with null for missing values, and which are missing, bool [n].

    Text becomes binary. Other types stay.
    """
    if _is_text_like(column.type):
        column = _as_binary(column, missing)
    return column, pc.is_null(column, nan_is_null=True).to_numpy(zero_copy_only=False)


def _labels(schema: Schema, column: pa.Array) -> tuple[np.ndarray, str]:
    """Converts the result of `_label_texts` to labels.

    Returns float32 [n], 0 or 1, NaN for malformed or missing labels, and a description of the
    allowed values.
    """
    if schema.positive:
        is_positive = pc.is_in(_as_text(column), value_set=_encoded(schema.positive))
        label = is_positive.to_numpy(zero_copy_only=False).astype(np.float32)
        return np.where(_nulls(column), np.float32(np.nan), label), "a value"
    if _is_text_like(column.type) and np.diff(text_offsets(column)).max(initial=0) >= _MIN_BOOLEAN:
        is_true, is_false = (pc.is_in(column, value_set=pa.array(v)) for v in (_TRUE, _FALSE))
        column = pc.if_else(is_true, b"1", pc.if_else(is_false, b"0", column))
    label = _single(_numbers(column, pa.array([], pa.binary()))[0])
    if schema.positive_from is None:
        allowed = (
            "0, 1, true or false. Set in `label` of the schema which values are 1: `positive_from` "
            "for numbers, for example ratings, or `positive` for texts and codes"
        )
        return np.where((label == 0) | (label == 1), label, np.float32(np.nan)), allowed
    label = np.where(np.isfinite(label), label >= schema.positive_from, np.nan)
    return label.astype(np.float32), "a finite number. For text set `positive` in the schema"


def _as_text(column: pa.Array) -> pa.Array:
    """Converts integers, booleans or text to binary values."""
    return column.cast(pa.string()).cast(pa.binary()) if not _is_text_like(column.type) else column


def _encoded(texts: Sequence[str]) -> pa.Array:
    return pa.array([text.encode() for text in texts], pa.binary())


def _counts(column: pa.Array) -> dict[str, int]:
    """Returns the number of each of the most frequent texts of a label column."""
    pairs = pc.value_counts(_as_text(column).drop_null()).to_pylist()
    counts: collections.Counter[str] = collections.Counter()
    for pair in pairs:
        counts[shown_label(pair["values"])] += pair["counts"]
    return dict(counts.most_common(_MAX_TEXTS))


def shown_label(value: bytes) -> str:
    """Returns a text of a label column as in `ParsedRows.label_counts`: its beginning."""
    return value[:MAX_SHOWN].decode(errors="backslashreplace")


def _nulls(column: pa.Array) -> np.ndarray:
    return column.is_null().to_numpy(zero_copy_only=False)


def _numbers(column: pa.Array, missing: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Converts a column to float64 [n] numbers.

    Missing and malformed values become NaN. The second result is a mask of the malformed rows.
    """
    is_malformed = np.zeros(len(column), bool)
    if not _is_text_like(column.type):
        values = pc.fill_null(column.cast(pa.float64(), safe=False), np.nan)
        return values.to_numpy(zero_copy_only=False), is_malformed
    text = _as_binary(column, missing)
    try:
        values = text.cast(pa.string()).cast(pa.float64())
        numbers = pc.fill_null(values, np.nan).to_numpy(zero_copy_only=False)
        # Arrow also parses "nan" and "inf". They are malformed unless `missing` lists them.
        is_malformed = ~np.isfinite(numbers) & text.is_valid().to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        numbers = np.full(len(text), np.nan)
        for row, value in enumerate(text.to_pylist()):
            if value is not None:
                numbers[row] = float(value) if _NUMBER.fullmatch(value) else math.nan
                is_malformed[row] = not math.isfinite(numbers[row])
    return numbers, is_malformed


def _single(numbers: np.ndarray) -> np.ndarray:
    """Rounds to float32. Numbers beyond its range become infinite."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32)


def _times(column: pa.Array, missing: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Converts a column of numbers, timestamps, dates or their text to float64 [n].

    Timestamps become microseconds, which float64 represents exactly for 285 years around 1970. The
    second result is a mask of the missing and malformed rows.
    """
    if _is_text_like(column.type):
        text = _as_binary(column, missing)
        try:
            column = text.cast(pa.string()).cast(pa.float64())
        except pa.ArrowInvalid:
            encoded = text.dictionary_encode()
            values = [_time(value) for value in encoded.dictionary.to_pylist()]
            column = pa.array(values, pa.float64()).take(encoded.indices)
    elif pa.types.is_temporal(column.type):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    times = pc.fill_null(column.cast(pa.float64(), safe=False), np.nan)
    values = times.to_numpy(zero_copy_only=False)
    return values, ~np.isfinite(values)


def _time(value: bytes) -> float:
    """Returns a number or the microseconds of a timestamp; NaN if it is neither."""
    if _NUMBER.fullmatch(value):
        return float(value)
    try:
        # Python 3.10 does not accept the suffix Z.
        moment = datetime.datetime.fromisoformat(value.decode().replace("Z", "+00:00"))
    except ValueError:
        return math.nan
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return moment.timestamp() * 1e6


def _keys(key: KeyColumn, column: pa.Array, missing: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Converts a column to the ids of a field.

    Returns int64 [n], with null for missing values, or lists of int64, without missing values, and
    a mask of the malformed rows.
    """
    if parquet.is_list(column.type):
        values = pc.list_flatten(column)
        if _is_text_like(values.type):
            values = _as_binary(values, missing)
        ids = parquet.lists_of(parquet.to_ids(values), parquet.list_lengths(column))
        return ids, parquet.have_malformed_ids(column)
    if not _is_text_like(column.type):
        return parquet.to_ids(column), parquet.have_malformed_ids(column)
    text = _as_binary(column, missing)
    if key.separator is None:
        return _text_ids(key.kind, text)
    is_malformed = np.zeros(len(column), bool)
    parts = pc.split_pattern(text, key.separator)
    lengths = parquet.list_lengths(parts)
    values, is_bad = _text_ids(key.kind, _as_binary(pc.list_flatten(parts), missing))
    is_malformed[np.repeat(np.arange(len(column)), lengths)[is_bad]] = True
    return parquet.lists_of(values, lengths), is_malformed


def _text_ids(kind: str, text: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Converts text to ids, int64 [n].

    Nulls are missing values. The second result is a mask of the malformed values.
    """
    if kind == TEXT:
        return parquet.to_ids(text), np.zeros(len(text), bool)
    is_missing = _nulls(text)
    filled = pc.fill_null(text, b"") if text.null_count else text
    values, is_parsed = (parse_hex if kind == HEX else parse_integers)(filled)
    may_be_whole = kind == INTEGER and not (is_parsed | is_missing).all()
    if may_be_whole and pc.any(pc.match_substring(filled, ".0")).as_py():
        filled = pc.replace_substring_regex(filled, *WHOLE)
        values, is_parsed = parse_integers(filled)
    is_malformed = ~(is_parsed & (np.diff(text_offsets(filled)) > 0)) & ~is_missing
    return pa.array(values, mask=is_missing), is_malformed
