"""Hashes strings to keys with TensorFlow ops (BLAKE2b).

The keys are bitwise equal to the keys of `data.readers.hashing.hash_strings`. A served model that
uses this module depends on TensorFlow only.
"""

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.keys import RESERVED_KEYS

# Constants of BLAKE2b (RFC 7693).
_BLOCK_BYTES = 128
_WORDS = 16
_ROUNDS = 12
_IV = np.array(
    [
        *(0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1),
        *(0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179),
    ],
    np.uint64,
)
_SIGMA = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    ],
    np.int32,
)
# Message schedule [rounds, 2, 4, 2]. Rounds 10 and 11 repeat rounds 0 and 1. Axis 1 selects columns
# or diagonals, axis 3 selects the argument `x` or `y` of `_mix`.
_SCHEDULE = np.stack([_SIGMA[r % 10] for r in range(_ROUNDS)]).reshape(_ROUNDS, 2, 4, 2)
_DIGEST_BYTES = 8


def hash_texts(texts: tf.Tensor) -> tf.Tensor:
    """Hashes strings to keys.

    Args:
        texts: String tensor of any shape.

    Returns:
        int64 of the same shape: the 8-byte BLAKE2b digest. The reserved values -1 (padding) and -2
        (the missing value of readers) never occur.
    """
    with tf.device("CPU:0"):  # string tensors are always on the CPU
        distinct, places = tf.unique(tf.reshape(texts, [-1]))
        keys = tf.reshape(tf.gather(_hash_distinct(distinct), places), tf.shape(texts))
    keys.set_shape(texts.shape)
    return keys


@tf.function(input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
def _hash_distinct(texts: tf.Tensor) -> tf.Tensor:
    lengths = tf.strings.length(texts)
    blocks = tf.maximum((lengths + _BLOCK_BYTES - 1) // _BLOCK_BYTES, 1)
    maximum = tf.reduce_max(tf.concat([blocks, [1]], 0))
    decoded = tf.io.decode_raw(texts, tf.int64, fixed_length=maximum * _BLOCK_BYTES)
    words = tf.reshape(tf.bitcast(decoded, tf.uint64), [-1, maximum, _WORDS])
    parameters = np.array([0x01010000 ^ _DIGEST_BYTES, *[0] * 7], np.uint64)
    state = tf.tile((_IV ^ parameters)[:, np.newaxis], [1, tf.size(texts)])

    def add(block: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        count = tf.minimum((block + 1) * _BLOCK_BYTES, lengths)
        after = _compress(state, tf.transpose(words[:, block]), count, block + 1 >= blocks)
        return block + 1, tf.where(block < blocks, after, state)

    _, state = tf.while_loop(lambda block, _: block < maximum, add, (tf.constant(0), state))
    keys = tf.bitcast(state[0], tf.int64)
    is_reserved = tf.reduce_any([tf.equal(keys, reserved) for reserved in RESERVED_KEYS], axis=0)
    return tf.where(is_reserved, keys + np.int64(1 << 62), keys)


def _compress(
    state: tf.Tensor, words: tf.Tensor, count: tf.Tensor, is_last: tf.Tensor
) -> tf.Tensor:
    """Applies the compression function F of BLAKE2b to n strings.

    Args:
        state: uint64 [8, n].
        words: uint64 [16, n], one block of each string.
        count: [n], number of bytes hashed so far.
        is_last: bool [n], whether the block is the last block of its string.
    """
    iv = tf.tile(tf.constant(_IV)[:, tf.newaxis], [1, tf.shape(state)[1]])
    all_bits = tf.where(is_last, np.uint64((1 << 64) - 1), np.uint64(0))
    last = tf.stack([tf.cast(count, tf.uint64), tf.zeros_like(all_bits), all_bits])
    last = tf.concat([tf.bitwise.bitwise_xor(iv[4:7], last), iv[7:]], 0)
    rows = (state[:4], state[4:], iv[:4], last)
    schedule = tf.constant(_SCHEDULE)

    def turn(number: tf.Tensor, *rows: tf.Tensor) -> tuple[tf.Tensor, ...]:
        for half, shifts in ((0, (0, 0, 0, 0)), (1, (0, -1, -2, -3))):
            rows = tuple(_rolled(row, shift) for row, shift in zip(rows, shifts, strict=True))
            chosen = schedule[number, half]
            x, y = tf.gather(words, chosen[:, 0]), tf.gather(words, chosen[:, 1])
            rows = _mix(rows, x, y)
            rows = tuple(_rolled(row, -shift) for row, shift in zip(rows, shifts, strict=True))
        return number + 1, *rows

    _, a, b, c, d = tf.while_loop(lambda r, *_: r < _ROUNDS, turn, (tf.constant(0), *rows))
    mixed = tf.bitwise.bitwise_xor(tf.concat([a, b], 0), tf.concat([c, d], 0))
    return tf.bitwise.bitwise_xor(state, mixed)


def _mix(rows: tuple[tf.Tensor, ...], x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Applies the mixing function G of BLAKE2b to four columns or diagonals.

    All tensors are uint64 [4, n].
    """
    a, b, c, d = rows
    xor = tf.bitwise.bitwise_xor
    for word, first, second in ((x, 32, 24), (y, 16, 63)):
        a = a + b + word
        d = _rotated(xor(d, a), first)
        c = c + d
        b = _rotated(xor(b, c), second)
    return a, b, c, d


def _rotated(values: tf.Tensor, bits: int) -> tf.Tensor:
    right = tf.bitwise.right_shift(values, np.uint64(bits))
    return tf.bitwise.bitwise_or(right, tf.bitwise.left_shift(values, np.uint64(64 - bits)))


def _rolled(rows: tf.Tensor, shift: int) -> tf.Tensor:
    shift %= 4
    return rows if shift == 0 else tf.concat([rows[4 - shift :], rows[: 4 - shift]], 0)
