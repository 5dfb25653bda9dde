"""Converts text and integer ids to int64 keys."""

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf._utils.keys import MISSING_KEY, RESERVED_KEYS

HEX_WIDTH = 8
_MAX_HEX_DIGITS = 15

# Maps two digits, as a little-endian uint16, to a byte; `_NO_BYTE` if they are not digits.
_NO_BYTE = 256
_ANY_NO_BYTE = np.uint64(_NO_BYTE * 0x0001_0001_0001_0001)
_DIGIT_CODES = np.frombuffer(b"0123456789abcdefABCDEF", np.uint8).astype(np.int64)
_DIGIT_VALUES = np.array([*range(16), *range(10, 16)])
_BYTES = np.full(1 << 16, _NO_BYTE, np.uint16)
_BYTES[_DIGIT_CODES[:, None] | _DIGIT_CODES << 8] = _DIGIT_VALUES[:, None] << 4 | _DIGIT_VALUES
MAX_DIGITS = 20
"""Maximum number of characters of an integer of 64 bits."""
_HALF = MAX_DIGITS // 2
_INTEGER = "^([0-9]{1,20}|-[0-9]{1,19})$"
DIGITS = np.full(256, -1, np.int64)
"""The value of each character as a digit, -1 if it is not a digit of base 16 or below."""
DIGITS[_DIGIT_CODES] = _DIGIT_VALUES


def hash_string(value: bytes) -> int:
    """Returns the key of a text, a 64-bit BLAKE2b hash.

    The key is never -1 (padding) or -2 (missing).
    """
    return int(_hashed([value])[0])


def _hashed(values: Sequence[bytes]) -> np.ndarray:
    """Returns `hash_string` of each value, int64 [n]."""
    digests = b"".join([hashlib.blake2b(value, digest_size=8).digest() for value in values])
    keys = np.frombuffer(digests, "<i8")
    is_reserved = np.logical_or.reduce([keys == reserved for reserved in RESERVED_KEYS])
    return np.where(is_reserved, keys + (1 << 62), keys)


# (reserved key, key of an id of this value), see `keys_of_ids`.
_MOVED = tuple((key, hash_string(b"%d" % key)) for key in RESERVED_KEYS)


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
    keys = np.append(_hashed(distinct), MISSING_KEY)
    indices = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return keys[indices]


def signed(value: int) -> int | None:
    """Returns the int64 with the bits of an int64 or uint64, or None for other integers."""
    if not -(1 << 63) <= value < 1 << 64:
        return None
    return value - (1 << 64) * (value >= 1 << 63)


def parse_hex(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parses hexadecimal values of up to 15 digits, 8 in Criteo's files.

    Args:
        values: A pyarrow binary array without nulls.

    Returns:
        (keys int64 [n], is_parsed bool [n]). An empty value becomes `MISSING_KEY` and counts as
        parsed. Longer values and values with other characters are not parsed.
    """
    offsets = text_offsets(values)
    lengths = np.diff(offsets)
    keys = np.full(len(values), MISSING_KEY, np.int64)
    is_parsed = lengths == 0
    is_whole = lengths == HEX_WIDTH
    rows = np.flatnonzero(is_whole)
    text = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    if rows.size:
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
    others = np.flatnonzero(~is_whole & (lengths > 0) & (lengths <= _MAX_HEX_DIGITS))
    if others.size:
        found = _parse_hex_digits(text, offsets[:-1][others], lengths[others])
        keys[others], is_parsed[others] = found
    return keys, is_parsed


def parse_integers(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parses decimal integers of 64 bits: digits with an optional minus sign.

    Args:
        values: A pyarrow binary array without nulls.

    Returns:
        (integers int64 [n], is_parsed bool [n]). Integers of uint64 have the int64 of the same 64
        bits. Values that are not parsed are 0: empty values, more than 20 characters, other
        characters, and integers that are too large.
    """
    offsets = text_offsets(values)
    lengths = np.diff(offsets)
    text = np.frombuffer(values.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    # Arrow's integer parser accepts other characters too, for example a hexadecimal prefix.
    is_digit, is_minus = text - np.uint8(ord("0")) < 10, text == ord("-")
    is_regular = lengths.max(initial=0) <= MAX_DIGITS and (is_digit | is_minus).all()
    is_parsed = lengths > 0
    if is_regular and lengths.max(initial=0) < MAX_DIGITS:
        with contextlib.suppress(pa.ArrowInvalid):  # For example, if a value is not in int64.
            return _int64(without(values, ~is_parsed)), is_parsed
    is_negative = np.zeros(len(values), bool)
    is_negative[is_parsed] = is_minus[(offsets[:-1] - offsets[0])[is_parsed]]
    if not is_regular or np.count_nonzero(is_minus) != np.count_nonzero(is_negative):
        matches = pc.match_substring_regex(values, _INTEGER)
        is_parsed = matches.to_numpy(zero_copy_only=False)
    is_parsed &= lengths > is_negative
    # Each value consists of two: up to ten digits, and the digits before. These are in int64.
    ends = offsets[1:]
    middle = np.maximum(ends - _HALF, offsets[:-1])
    both = np.append(np.stack([offsets[:-1], middle], 1), offsets[-1:])
    parts = pa.Array.from_buffers(
        pa.binary(),
        2 * len(values),
        [None, pa.py_buffer(both.astype(np.int32)), values.buffers()[2]],
    )
    is_empty = np.diff(both) == 0
    is_empty[::2] |= is_negative & (middle - offsets[:-1] == 1)
    numbers = np.abs(_int64(without(parts, is_empty | np.repeat(~is_parsed, 2))))
    high, low = numbers[::2], numbers[1::2]
    for is_of_sign, maximum in ((is_negative, 1 << 63), (~is_negative, (1 << 64) - 1)):
        top, rest = divmod(maximum, 10**_HALF)
        is_parsed &= ~is_of_sign | (high < top) | ((high == top) & (low <= rest))
    integers = high * 10**_HALF + low  # Wraps around, which keeps the 64 bits.
    return np.where(is_parsed, np.where(is_negative, -integers, integers), 0), is_parsed


def _int64(values: pa.Array) -> np.ndarray:
    """Parses integers; nulls are 0. Raises ArrowInvalid if a value is malformed."""
    text = pa.Array.from_buffers(pa.string(), len(values), values.buffers(), offset=values.offset)
    return pc.fill_null(text.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)


def _parse_hex_digits(
    text: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Parses hexadecimal values of 1 to 15 digits, one place of all values at a time.

    Args:
        text: uint8, the bytes of all values.
        starts: int32 [n], positions of the first digits.
        lengths: int32 [n].
    """
    keys, is_parsed = np.zeros(len(starts), np.int64), np.ones(len(starts), bool)
    for place in range(int(lengths.max())):
        is_used = lengths > place
        digit = DIGITS.take(text.take(starts + place, mode="clip"))
        is_parsed &= ~is_used | (digit >= 0)
        keys = np.where(is_used, keys << 4 | digit, keys)
    return keys, is_parsed


def without(values: pa.Array, is_left_out: np.ndarray) -> pa.Array:
    """Returns an array with null where masked. The bytes of the values are not copied.

    Args:
        values: Binary array [n].
        is_left_out: bool [n].
    """
    is_kept = ~is_left_out
    if values.null_count:
        is_kept &= values.is_valid().to_numpy(zero_copy_only=False)
    bits = np.packbits(np.pad(is_kept, (values.offset, 0)), bitorder="little")
    buffers = [pa.py_buffer(bits), *values.buffers()[1:]]
    return pa.Array.from_buffers(values.type, len(values), buffers, offset=values.offset)


def text_offsets(values: pa.Array) -> np.ndarray:
    """Returns offsets of binary values in their buffer, int32 [n + 1]."""
    offsets = np.frombuffer(values.buffers()[1], np.int32)
    return offsets[values.offset : values.offset + len(values) + 1]
