"""Text values to int64 keys: hexadecimal by value, anything else by a stable 64-bit hash."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from slipstream_tf.inputs.spec import MISSING_KEY

HEX_WIDTH = 8

_NIBBLES = np.full(256, 255, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789", np.uint8)] = np.arange(10)
_NIBBLES[np.frombuffer(b"abcdef", np.uint8)] = np.arange(10, 16)
_NIBBLES[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)


def hash_string(value: bytes) -> int:
    """Returns the key of a text value: BLAKE2b to 64 bits, never -1 or -2 (padding, missing)."""
    key = int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little", signed=True)
    return key if key not in (-1, MISSING_KEY) else key + (1 << 62)


def hash_strings(values: Any) -> np.ndarray:
    """Hashes text values, each distinct one once.

    Args:
        values: a pyarrow string or binary array (chunked or not), or a sequence of str or bytes;
            nulls become MISSING_KEY.

    Returns:
        int64 [n], the same on every machine and in every run.
    """
    array = values
    if not isinstance(array, (pa.Array, pa.ChunkedArray)):
        array = pa.array([v.encode() if isinstance(v, str) else v for v in values], pa.binary())
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    encoded = array.dictionary_encode()
    distinct = [v.encode() if isinstance(v, str) else v for v in encoded.dictionary.to_pylist()]
    keys = np.array([hash_string(v) for v in distinct] + [MISSING_KEY], np.int64)
    places = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return keys[places]


def parse_hex(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parses hexadecimal values of 8 digits, the form in Criteo's files.

    Args:
        values: a pyarrow binary array without nulls.

    Returns:
        (keys int64 [n], is_parsed bool [n]); an empty value is MISSING_KEY. Values of another
        length or with other characters are left to the caller.
    """
    offsets = np.frombuffer(values.buffers()[1], np.int32)[
        values.offset : values.offset + len(values) + 1
    ].astype(np.int64)
    lengths = np.diff(offsets)
    keys = np.full(len(values), MISSING_KEY, np.int64)
    is_parsed = lengths == 0
    rows = np.flatnonzero(lengths == HEX_WIDTH)
    if rows.size:
        text = np.frombuffer(values.buffers()[2], np.uint8)
        nibbles = _NIBBLES[text[offsets[rows, None] + np.arange(HEX_WIDTH)]]
        shifts = np.arange(4 * (HEX_WIDTH - 1), -1, -4, dtype=np.int64)
        keys[rows] = (nibbles.astype(np.int64) << shifts).sum(axis=1)
        is_parsed[rows] = (nibbles < 16).all(axis=1)
    return keys, is_parsed
