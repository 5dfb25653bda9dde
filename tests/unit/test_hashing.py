"""Tests that Python hashes and owners match cc_ops/core/base/hash.h."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf._utils.hashing import GOLDEN, finalise, hash_keys, mix64, stream
from slipstream_tf.config import Table
from slipstream_tf.distributed.sharded import owner_of
from slipstream_tf.ops import exchange
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.table import LookupLayout
from slipstream_tf.optimizers import SGD
from slipstream_tf.tables.native import NativeStore

# Key -> HashKey(key), printed by a program that includes hash.h.
BY_CORE = {
    0: 0xE220A8397B1DCDAF,
    1: 0x910A2DEC89025CC1,
    -1: 0xE4D971771B652C20,
    2: 0x975835DE1C9756CE,
    42: 0xBDD732262FEB6E95,
    4611686018427387904: 0x00AA50EA8E0FA9EB,
    -9223372036854775808: 0x481EC0A212A9F3DB,
    1234567890123456789: 0x9904EEE77E231DB2,
}
KEYS = np.array(list(BY_CORE), np.int64)


def test_python_hash_equals_core_hash() -> None:
    assert hash_keys(KEYS).tolist() == list(BY_CORE.values())
    assert hash_keys(KEYS[:0]).shape == (0,)


@pytest.mark.parametrize("call", [finalise, mix64])
def test_tensor_hash_equals_array_hash(call: Any) -> None:
    """Checks eager and graph mode and two-dimensional input."""
    values = KEYS.view(np.uint64).reshape(2, 4)
    assert (call(tf.constant(values)).numpy() == call(values)).all()
    assert (tf.function(call)(tf.constant(values)).numpy() == call(values)).all()
    assert finalise(np.zeros(1, np.uint64)) == 0


def test_random_stream_equals_definition() -> None:
    seeds, counters = KEYS.view(np.uint64)[:, None], np.arange(5, dtype=np.uint64)
    drawn = stream(seeds, counters)
    assert (drawn[:, 0] == finalise(seeds[:, 0])).all()
    # Number n is number n - 1 of the stream that starts one step later. The second check is the
    # definition in the paper.
    assert (drawn[:, 1:] == stream(seeds + GOLDEN, counters[:-1])).all()
    assert (drawn[:, 1] == mix64(seeds[:, 0])).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000])
def test_python_and_core_assign_key_to_same_rank(ranks: int) -> None:
    generator = np.random.default_rng(ranks)
    keys = np.unique(
        np.concatenate([KEYS[KEYS != -1], generator.integers(-(2**63), 2**63 - 1, 5000)])
    )
    copies = NativeStore([Table("t", 2)], SGD(0.1))._handles
    packed = pack({"f": tf.constant(keys)}, (FeatureSpec("f", "t"),))
    layout = LookupLayout((0,), ("sum",), (2,), is_stacked=False)
    _, sizes, routed = exchange.route_keys(copies, packed, layout, ranks)
    owners = np.repeat(np.arange(ranks), sizes.numpy().reshape(ranks, -1).sum(axis=1))
    assert sorted(routed.numpy()) == keys.tolist()
    assert (owner_of(routed.numpy(), ranks) == owners).all()
