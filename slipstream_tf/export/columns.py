"""Converts columns of users' files to the inputs of a model, with plain TensorFlow ops.

The keys and numbers are equal to those that `PreparedReader` returns for the same rows. Therefore a
SavedModel can take the values of the original files.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.keys import MISSING_KEY, RESERVED_KEYS
from slipstream_tf.data.columns import ALLOWED, EXACT, WHOLE, missing_numbers
from slipstream_tf.data.readers.hashing import DIGITS, MAX_DIGITS, hash_string
from slipstream_tf.data.readers.prepared import is_prepared, read_manifest
from slipstream_tf.data.schema import INTEGER, LOG, TEXT
from slipstream_tf.data.statistics import COUNTS
from slipstream_tf.ops.text_keys import hash_texts

MISSING_INTEGER = -(1 << 63)
"""Integer input of a SavedModel that means a missing id."""


def has_schema(folder: str | os.PathLike[str]) -> bool:
    """Returns whether `slipstream-prepare` wrote a folder with a schema.

    Raises:
        OSError: If the manifest cannot be read.
        ValueError: If the manifest is damaged.
    """
    return is_prepared(folder) and "schema" in read_manifest(folder)["source"]


class RawColumns:
    """Converts the columns of the original files to batches of `PreparedReader`."""

    def __init__(self, folder: str | os.PathLike[str]):
        """Reads the schema of prepared data.

        Args:
            folder: Folder that `slipstream-prepare` wrote with a schema.

        Raises:
            OSError: If the manifest cannot be read.
            ValueError: If the folder was prepared without a schema or is damaged, or if a column
                contains the id `MISSING_INTEGER`.
        """
        if not has_schema(folder):
            allowed = "a folder that slipstream-prepare wrote with --schema"
            raise invalid("prepared", os.fspath(folder), "a SavedModel", allowed)
        manifest = read_manifest(folder)
        schema, columns = manifest["source"]["schema"], manifest["columns"]
        self._missing: list[str] = schema["missing"]
        self._missing_ids, numbers = missing_numbers(self._missing)
        # Dense columns of Parquet files may be numbers, to which the missing texts do not apply.
        is_text = manifest["source"].get("format") != "parquet"
        self._missing_dense = numbers if is_text else numbers[:0]
        # Column -> (kind, separator), in the order of the key columns.
        self._keys = {key["column"]: (key["kind"], key["separator"]) for key in schema["keys"]}
        self._logs = {dense["column"]: dense["transform"] == LOG for dense in schema["dense"]}
        self._types = dict(zip(columns["keys"], columns["key_types"], strict=True))
        self._lists = frozenset(columns["lists"])
        self._require_served(folder)
        self.signature = self._signature()

    def _require_served(self, folder: str | os.PathLike[str]) -> None:
        """Raises ValueError if training examples have the id that means a missing integer."""
        path = Path(folder, COUNTS)
        if not path.exists():  # The data is not completely prepared.
            return
        found = pq.read_table(path, columns=["field"], filters=[("key", "=", MISSING_INTEGER)])
        for name in found["field"].to_pylist():
            if self._types[name] != TEXT:
                uint64 = f" ({1 << 63} of uint64)"
                raise ValueError(
                    f"{os.fspath(folder)}: the column {name!r} contains the id {MISSING_INTEGER}"
                    f"{uint64 if self._types[name] == 'uint64' else ''}, which means a missing "
                    "value in requests to a SavedModel. Replace the id in the files, or read the "
                    "column as text."
                )

    def _signature(self) -> dict[str, tf.TypeSpec]:
        """Returns the specs of the columns by name.

        A key column is text or integers [None]; lists without a separator are ragged. A dense
        column is float32 [None].
        """
        specs: dict[str, tf.TypeSpec] = {}
        for name, (_, separator) in self._keys.items():
            dtype = tf.string if self._types[name] == TEXT else tf.as_dtype(self._types[name])
            specs[name] = tf.TensorSpec([None], dtype)
            if name in self._lists and separator is None:
                specs[name] = tf.RaggedTensorSpec([None, None], dtype, 1)
        return specs | {name: tf.TensorSpec([None], tf.float32) for name in self._logs}

    def features(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a batch of columns to the features of `PreparedReader`.

        Args:
            columns: Values with the specs in `signature`, by column name. A text that the schema
                lists as missing, `MISSING_INTEGER` and NaN are missing values. If the files contain
                text, the number of a missing text is a missing value, too. Missing values of a bag
                are dropped, and a missing bag is empty.

        Returns:
            `"keys"`, int64 [batch, fields] or a dictionary by column, and, if there are dense
            columns, `"dense"`, float32 [batch, dense columns].

        Raises:
            tf.errors.InvalidArgumentError: If a text is not a number, or not in the range of int64
                and uint64, although the schema reads it as a number.
        """
        keys: Any = {
            name: self._column(name, columns[name], *settings)
            for name, settings in self._keys.items()
        }
        if not self._lists:
            keys = tf.stack(list(keys.values()), axis=1)
        if not self._logs:
            return {"keys": keys}
        dense = [self._number(columns[name], is_log) for name, is_log in self._logs.items()]
        return {"dense": tf.stack(dense, axis=1), "keys": keys}

    def _column(self, name: str, values: Any, kind: str, separator: str | None) -> Any:
        """Returns the keys of a column, int64 [batch] or ragged [batch, None]."""
        if separator is None and not isinstance(values, tf.RaggedTensor):
            return _keys(name, values, kind, self._missing_of(values.dtype, kind))
        if separator is None:
            is_missing = _are_missing(values.flat_values, self._missing_of(values.dtype, kind))
        else:
            is_missing = _is_any_of(values, self._missing)
            values = tf.strings.split(values, sep=separator)
            is_missing = tf.gather(is_missing, values.value_rowids())
            is_missing |= _is_any_of(values.flat_values, self._missing)
        present = tf.ragged.boolean_mask(values, values.with_flat_values(~is_missing))
        return present.with_flat_values(_keys(name, present.flat_values, kind, ()))

    def _missing_of(self, dtype: tf.DType, kind: str) -> Sequence[Any]:
        """Returns the values of a key column that are missing, besides `MISSING_INTEGER`."""
        if dtype == tf.string:
            return self._missing
        # The files contain text if the kind is `INTEGER`.
        return self._missing_ids.tolist() if kind == INTEGER else ()

    def _number(self, values: tf.Tensor, is_log: bool) -> tf.Tensor:
        """Returns the transformed numbers of a dense column, float32 [batch].

        Missing numbers are NaN, because models fill them.
        """
        values = tf.where(_is_any_of(values, self._missing_dense), np.float32(np.nan), values)
        if not is_log:
            return values
        exact = tf.cast(values, tf.float64)
        return tf.cast(tf.sign(exact) * tf.math.log1p(tf.abs(exact)), tf.float32)


def _keys(name: str, values: tf.Tensor, kind: str, missing: Sequence[Any]) -> tf.Tensor:
    """Converts text or integers [n] to keys, int64 [n].

    Args:
        name: Name of the column, for errors.
        values: string, int64 or uint64 [n].
        kind: Conversion of text, see `KeyColumn`.
        missing: Texts, or ids as int64, that represent a missing value.
    """
    is_missing = _are_missing(values, missing)
    if values.dtype != tf.string:
        keys = tf.bitcast(values, tf.int64)
    else:
        keys = hash_texts(values) if kind == TEXT else _parsed(name, values, kind, is_missing)
    for reserved in RESERVED_KEYS:  # As in `keys_of_ids`.
        moved = np.int64(hash_string(b"%d" % reserved))
        keys = tf.where(tf.equal(keys, reserved), moved, keys)
    return tf.where(is_missing, np.int64(MISSING_KEY), keys)


def _are_missing(values: tf.Tensor, missing: Sequence[Any]) -> tf.Tensor:
    """Returns whether each value [n] is missing, bool [n]; see `_keys`."""
    if values.dtype == tf.string:
        return _is_any_of(values, missing)
    return _is_any_of(tf.bitcast(values, tf.int64), [MISSING_INTEGER, *missing])


def _is_any_of(values: tf.Tensor, missing: Iterable[Any]) -> tf.Tensor:
    """Returns whether each value [n] is one of the missing values, bool [n]."""
    is_missing = tf.zeros(tf.shape(values), tf.bool)
    for value in missing:
        is_missing |= tf.equal(values, value)
    return is_missing


def _parsed(name: str, texts: tf.Tensor, kind: str, is_ignored: tf.Tensor) -> tf.Tensor:
    """Parses texts [n] as integers of 64 bits, int64 [n].

    `tf.strings.to_number` supports neither hexadecimal digits nor uint64.

    Args:
        name: Name of the column, for the error.
        texts: The texts.
        kind: `INTEGER` or `HEX`.
        is_ignored: bool [n]. Where True, the text may be malformed.
    """
    pattern, base = EXACT[kind]
    if kind == INTEGER:
        texts = tf.strings.regex_replace(texts, *WHOLE)
    is_number = tf.strings.regex_full_match(texts, pattern.pattern)
    is_negative = tf.strings.regex_full_match(texts, "-.*")
    digits = tf.strings.regex_replace(texts, "^-", "")
    digits = tf.strings.substr(tf.strings.join(["0" * MAX_DIGITS, digits]), -MAX_DIGITS, MAX_DIGITS)
    codes = tf.io.decode_raw(digits, tf.uint8, fixed_length=MAX_DIGITS)
    values = tf.gather(DIGITS, tf.cast(codes, tf.int32))
    # The number is `high * base**half + low`. Integers of uint64 wrap around, which keeps their 64
    # bits.
    half = MAX_DIGITS // 2
    places = base ** np.arange(half - 1, -1, -1)
    high, low = (tf.reduce_sum(part * places, 1) for part in (values[:, :half], values[:, half:]))
    (top, rest), (negative_top, negative_rest) = (
        divmod(limit, base**half) for limit in ((1 << 64) - 1, 1 << 63)
    )
    top = tf.where(is_negative, np.int64(negative_top), np.int64(top))
    rest = tf.where(is_negative, np.int64(negative_rest), np.int64(rest))
    is_number &= (high < top) | ((high == top) & (low <= rest))
    wrong = tf.boolean_mask(texts, ~(is_number | is_ignored))[:1]
    message = f"Invalid text in column {name!r}. Expected {ALLOWED[kind]}, or a missing value."
    with tf.control_dependencies([tf.debugging.assert_equal(tf.size(wrong), 0, message)]):
        number = high * base**half + low
    return tf.where(is_negative, -number, number)
