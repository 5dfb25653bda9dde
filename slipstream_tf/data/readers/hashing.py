"""Text values to int64: numbers in hexadecimal or decimal by value, others by a 64-bit hash."""

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf.data.spec import MISSING_KEY

HEX_WIDTH = 8

# Two digits, as they lie in memory, to their byte; _NO_BYTE where they are no digits.
_NO_BYTE = 256
_DIGITS = np.frombuffer(b"0123456789abcdefABCDEF", np.uint8).astype(np.int64)
_DIGIT_VALUES = np.array([*range(16), *range(10, 16)])
_BYTES = np.full(1 << 16, _NO_BYTE, np.uint16)
_BYTES[_DIGITS[:, None] | _DIGITS << 8] = _DIGIT_VALUES[:, None] << 4 | _DIGIT_VALUES
# An integer of so many characters fits 64 bits, whatever they are.
_SURE_DIGITS = 18
_IS_OF_INTEGER = np.zeros(256, bool)
_IS_OF_INTEGER[list(b"0123456789-")] = True


def hash_string(value: bytes) -> int:
    """Returns the key of a text value: BLAKE2b to 64 bits, never -1 or -2 (padding, missing)."""
    key = int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little", signed=True)
    return key if key not in (-1, MISSING_KEY) else key + (1 << 62)


def hash_strings(values: Any) -> np.ndarray:
    """Hashes text values, each distinct one once.

    Args:
        values: a pyarrow string or binary array, chunked or not; nulls become MISSING_KEY.

    Returns:
        int64 [n], the same on every machine and in every run.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    # As bytes: what a file calls text need not be.
    types = pa.types
    if types.is_string(array.type) or types.is_large_string(array.type):
        array = array.cast(pa.binary() if types.is_string(array.type) else pa.large_binary())
    encoded = array.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    keys = np.array([hash_string(v) for v in distinct] + [MISSING_KEY], np.int64)
    indices = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return keys[indices]


def parse_hex(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parses hexadecimal values of 8 digits, the form in Criteo's files.

    Args:
        values: a pyarrow binary array without nulls.

    Returns:
        (keys int64 [n], is_parsed bool [n]); an empty value is MISSING_KEY. Values of another
        length or with other characters are left to the caller.
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
        is_hex = np.bitwise_or.reduce(parsed.reshape(-1, HEX_WIDTH // 2), axis=1) < _NO_BYTE
        if rows.size == len(values):
            return values_of_rows, is_hex
        keys[rows], is_parsed[rows] = values_of_rows, is_hex
    return keys, is_parsed


def parse_integers(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parses plain integers: digits, perhaps after a minus sign.

    Args:
        values: a pyarrow binary array without nulls.

    Returns:
        (integers int64 [n], is_parsed bool [n]). Values of more than 18 characters may be integers
        and are left to the caller; what is not parsed is 0.
    """
    offsets = text_offsets(values)
    lengths = np.diff(offsets)
    is_blank = lengths == 0
    try:
        # Arrow reads more than digits and minus signs as integers.
        text = np.frombuffer(values.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
        if lengths.max(initial=0) > _SURE_DIGITS or not _IS_OF_INTEGER.take(text).all():
            raise pa.ArrowInvalid("not plain integers alone")
        return _integers(values, is_blank), ~is_blank
    except pa.ArrowInvalid:
        # At least one value is something else: the others still go the fast way.
        is_integer = pc.match_substring_regex(values, "^-?[0-9]{1,17}$")
        is_parsed = is_integer.to_numpy(zero_copy_only=False)
        return _integers(values, ~is_parsed), is_parsed


def _integers(values: pa.Array, is_left_out: np.ndarray) -> np.ndarray:
    """Integers, 0 where left out; raises ArrowInvalid if one is malformed."""
    wanted = pc.if_else(pa.array(is_left_out), pa.scalar(None, pa.binary()), values)
    integers = wanted.cast(pa.string()).cast(pa.int64())
    return pc.fill_null(integers, 0).to_numpy(zero_copy_only=False)


def text_offsets(values: pa.Array) -> np.ndarray:
    """Returns where the values of a binary array lie in its text, int32 [n + 1]."""
    offsets = np.frombuffer(values.buffers()[1], np.int32)
    return offsets[values.offset : values.offset + len(values) + 1]
