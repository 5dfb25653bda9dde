"""Converts text and integer ids to int64 keys."""

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf.data.spec import MISSING_KEY

HEX_WIDTH = 8

# Maps two digits, as a little-endian uint16, to a byte; `_NO_BYTE` if they are not digits.
_NO_BYTE = 256
_ANY_NO_BYTE = np.uint64(_NO_BYTE * 0x0001_0001_0001_0001)
_DIGITS = np.frombuffer(b"0123456789abcdefABCDEF", np.uint8).astype(np.int64)
_DIGIT_VALUES = np.array([*range(16), *range(10, 16)])
_BYTES = np.full(1 << 16, _NO_BYTE, np.uint16)
_BYTES[_DIGITS[:, None] | _DIGITS << 8] = _DIGIT_VALUES[:, None] << 4 | _DIGIT_VALUES
# Maximum number of characters with which each integer fits into 64 bits.
_SURE_DIGITS = 18


def hash_string(value: bytes) -> int:
    """Returns the key of a text, a 64-bit BLAKE2b hash.

    The key is never -1 (padding) or -2 (missing).
    """
    key = int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little", signed=True)
    return key if key not in (-1, MISSING_KEY) else key + (1 << 62)


# (reserved key, key of an id of this value), see `keys_of_ids`.
_MOVED = tuple((key, hash_string(b"%d" % key)) for key in (-1, MISSING_KEY))


def keys_of_ids(ids: np.ndarray) -> np.ndarray:
    """Returns the keys of integer ids in a batch.

    An id is its own key. Only the ids -1 and -2 get other keys, the hashes of the texts "-1" and
    "-2", because the keys -1 and -2 mean padding and missing.

    Args:
        ids: int64 of any shape. Ids of type uint64 have the int64 of the same 64 bits.
    """
    keys = ids
    for reserved, moved in _MOVED:
        is_reserved = ids == reserved
        if is_reserved.any():
            keys = np.where(is_reserved, moved, keys)
    return keys


def hash_strings(values: Any) -> np.ndarray:
    """Hashes text values. Each distinct value is hashed once.

    Args:
        values: A pyarrow string or binary array, chunked or not. Nulls become `MISSING_KEY`.

    Returns:
        int64 [n], the same on all machines and in all runs.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    # Hash bytes, because string columns of files may contain invalid UTF-8.
    types = pa.types
    if types.is_string(array.type) or types.is_large_string(array.type):
        array = array.cast(pa.binary() if types.is_string(array.type) else pa.large_binary())
    encoded = array.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    keys = np.array([hash_string(v) for v in distinct] + [MISSING_KEY], np.int64)
    indices = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return keys[indices]


def signed(value: int) -> int | None:
    """Returns the int64 with the bits of an int64 or uint64, or None for other integers."""
    if not -(1 << 63) <= value < 1 << 64:
        return None
    return value - (1 << 64) * (value >= 1 << 63)


def parse_hex(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parses hexadecimal values of 8 digits, the form in Criteo's files.

    Args:
        values: A pyarrow binary array without nulls.

    Returns:
        (keys int64 [n], is_parsed bool [n]). An empty value becomes `MISSING_KEY` and counts as
        parsed. Values of other lengths or with other characters are not parsed; the caller must
        handle them.
    """
    offsets = text_offsets(values)
    lengths = np.diff(offsets)
    keys = np.full(len(values), MISSING_KEY, np.int64)
    is_parsed = lengths == 0
    is_whole = lengths == HEX_WIDTH
    rows = np.flatnonzero(is_whole)
    if rows.size:
        text = np.frombuffer(values.buffers()[2], np.uint8)
        if rows.size + np.count_nonzero(is_parsed) == len(values):
            digits = text[offsets[0] : offsets[-1]]
        else:
            digits = text.take(offsets[rows, None] + np.arange(HEX_WIDTH)).ravel()
        parsed = _BYTES.take(digits.view("<u2"))
        values_of_rows = parsed.astype(np.uint8).view(">u4").astype(np.int64)
        # The four bytes of a value are tested at once.
        is_hex = parsed.view(np.uint64) & _ANY_NO_BYTE == 0
        if rows.size == len(values):
            return values_of_rows, is_hex
        keys[rows], is_parsed[rows] = values_of_rows, is_hex
    return keys, is_parsed


def parse_integers(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parses decimal integers: digits with an optional minus sign.

    Args:
        values: A pyarrow binary array without nulls.

    Returns:
        (integers int64 [n], is_parsed bool [n]). Values that are not parsed, such as empty values,
        are 0. They may include integers of at least 18 characters, which the caller must handle.
    """
    offsets = text_offsets(values)
    lengths = np.diff(offsets)
    is_blank = lengths == 0
    try:
        # Arrow's integer parser accepts other characters too, for example a hexadecimal prefix.
        text = np.frombuffer(values.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
        is_of_integer = (text - np.uint8(ord("0")) < 10) | (text == ord("-"))
        if lengths.max(initial=0) > _SURE_DIGITS or not is_of_integer.all():
            # Caught below, so that users never see this message.
            raise pa.ArrowInvalid("Invalid value. Expected digits with an optional minus sign.")
        return _integers(values, is_blank), ~is_blank
    except pa.ArrowInvalid:
        # At least one value is no integer or is too long. The others still use the fast parser.
        is_integer = pc.match_substring_regex(values, "^-?[0-9]{1,17}$")
        is_parsed = is_integer.to_numpy(zero_copy_only=False)
        return _integers(values, ~is_parsed), is_parsed


def _integers(values: pa.Array, is_left_out: np.ndarray) -> np.ndarray:
    """Returns integers, 0 where masked; raises ArrowInvalid if another value is malformed."""
    integers = without(values, is_left_out, pa.string()).cast(pa.int64())
    return pc.fill_null(integers, 0).to_numpy(zero_copy_only=False)


def without(values: pa.Array, is_left_out: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
    """Returns an array with null where masked. The bytes of the values are not copied.

    Args:
        values: Binary array [n].
        is_left_out: bool [n].
        kind: Binary or string type of the result. Defaults to the type of `values`.
    """
    is_kept = ~is_left_out
    if values.null_count:
        is_kept &= values.is_valid().to_numpy(zero_copy_only=False)
    bits = np.packbits(np.pad(is_kept, (values.offset, 0)), bitorder="little")
    buffers = [pa.py_buffer(bits), *values.buffers()[1:]]
    return pa.Array.from_buffers(kind or values.type, len(values), buffers, offset=values.offset)


def text_offsets(values: pa.Array) -> np.ndarray:
    """Returns offsets of binary values in their buffer, int32 [n + 1]."""
    offsets = np.frombuffer(values.buffers()[1], np.int32)
    return offsets[values.offset : values.offset + len(values) + 1]
