"""distributed.exchange: names of collectives, and what travels."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.distributed import SingleProcess, exchange
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.exchange import SendBuffer


def test_eager_calls_of_one_collective_have_one_name():
    names = exchange.Names("test_eager")
    assert [names.of("a"), names.of("b"), names.of("a")] == [
        "slipstream.test_eager.a",
        "slipstream.test_eager.b",
        "slipstream.test_eager.a",
    ]


def test_objects_with_one_prefix_are_numbered():
    first, second = exchange.Names("test_numbers"), exchange.Names("test_numbers")
    assert first.of("a") == "slipstream.test_numbers.a"
    assert second.of("a") == "slipstream.test_numbers.1.a"


def test_every_graph_numbers_its_collectives_anew():
    names, seen = exchange.Names("test_graphs"), []

    @tf.function
    def step(x):
        seen.append([names.of("a"), names.of("a"), names.of("b")])
        return x

    step(tf.zeros([1]))
    step(tf.zeros([2]))  # traced again
    prefix = "slipstream.test_graphs"
    assert seen == [[f"{prefix}.a", f"{prefix}.a-1", f"{prefix}.b"]] * 2


def test_values_are_rounded_after_the_warmup():
    wire = exchange.Wire("bfloat16", warmup_steps=2)

    @tf.function
    def rounds(step):
        return wire.rounds(step)

    assert [bool(rounds(tf.constant(step))) for step in range(4)] == [False, False, True, True]
    assert exchange.Wire("bfloat16").rounds(tf.constant(0)) is True
    assert exchange.Wire("float32", warmup_steps=2).rounds(tf.constant(3)) is False


def rows_of(sizes, keys, values) -> SendBuffer:
    return SendBuffer(
        tf.constant([sizes], tf.int64), tf.constant(keys, tf.int64), tf.constant(values, tf.float32)
    )


def test_rows_of_one_process_stay_where_they_are():
    own = rows_of([1, 0], [4], [1.0, 2.0])
    names = exchange.Names("test_alone")
    got = exchange.gather_rows(SingleProcess(), own, [2, 1], names, "rows", "gradients", True)
    assert got is own


def test_settings_of_the_wire_are_checked():
    with pytest.raises(ValueError, match=r"wire_dtype.*float16"):
        exchange.Wire("float16")
    with pytest.raises(ValueError, match=r"wire_warmup_steps.*-1"):
        exchange.Wire("bfloat16", warmup_steps=-1)


def test_float32_travels_as_it_is_and_bfloat16_rounded(run_as_ranks):
    values = [1.0, 1.0 + 2**-6, 1.0 + 2**-12, -3e38]
    own, names = rows_of([2], [4, 5], values), exchange.Names("test_rounding")

    def program(comm, rounds):
        return exchange.gather_rows(comm, own, [2], names, "rows", "gradients", rounds)

    for rounds in (False, tf.constant(False), True, tf.constant(True)):
        for got in run_as_ranks(2, lambda comm, rounds=rounds: program(comm, rounds)):
            wanted = [1.0, 1.0 + 2**-6, 1.0, -3e38] if bool(rounds) else values
            rtol = 2**-8 * bool(rounds)
            np.testing.assert_allclose(got.values[:4], np.float32(wanted), rtol=rtol)
            assert got.values[:3].numpy().tolist() == np.float32(wanted[:3]).tolist()


def test_all_ranks_get_the_rows_of_all(run_as_ranks):
    sent = [rows_of([1, 1], [4, 5], [1, 2, 3]), rows_of([0, 0], [], []), rows_of([0, 1], [6], [4])]
    names = exchange.Names("test_rows")

    def program(comm):
        own = sent[comm.rank]
        return exchange.gather_rows(comm, own, [2, 1], names, "rows", "gradients", True)

    for got in run_as_ranks(3, program):
        assert got.sizes.numpy().tolist() == [[1, 1], [0, 0], [0, 1]]
        assert got.keys.numpy().tolist() == [4, 5, 6]
        assert got.values.numpy().tolist() == [1, 2, 3, 4]


def test_each_rank_gets_what_is_meant_for_it(run_as_ranks):
    names = exchange.Names("test_owners")

    def program(comm):
        # One row of each table for rank 0, two of the second for rank 1.
        sizes = tf.constant([[1, 1], [0, 2]], tf.int64)
        keys = tf.constant([0, 1, 2, 3], tf.int64) + 10 * (comm.rank + 1)
        own = SendBuffer(sizes, keys, tf.constant([1.0, 2, 3, 4, 5]) * (comm.rank + 1))
        return exchange.exchange_rows(comm, own, [2, 1], names, "rows", "gradients")

    first, second = run_as_ranks(2, program)
    assert first.sizes.numpy().tolist() == [[1, 1], [1, 1]]
    assert first.keys.numpy().tolist() == [10, 11, 20, 21]
    assert first.values.numpy().tolist() == [1, 2, 3, 2, 4, 6]
    assert second.sizes.numpy().tolist() == [[0, 2], [0, 2]]
    assert second.keys.numpy().tolist() == [12, 13, 22, 23]
    assert second.values.numpy().tolist() == [4, 5, 8, 10]


def test_bytes_are_counted_by_what_they_are():
    own = rows_of([2, 1], [4, 5, 6], [1, 2, 3, 4, 5])
    for kind, rounds, wanted in (
        ("gradients", False, [24, 20]),
        ("gradients", tf.constant(True), [24, 10]),
        (["gradients", "deferred"], True, [24, 8, 2]),
    ):
        mixed = exchange._kinds_of(own.sizes[0], [2, 1], kind, rounds)
        assert [int(nbytes) for _, nbytes in mixed.parts] == wanted
        assert [name for name, _ in mixed.parts[1:]] == ([kind] if kind == "gradients" else kind)


def test_messages_that_are_damaged_are_refused():
    own = rows_of([1], [4], [1.0, 2.0])
    message, lengths = exchange_ops.pack_messages(own, [2])
    assert lengths.numpy().tolist() == [message.shape[0]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="the message of rank 0 has a length"):
        exchange_ops.unpack_messages(message[:-8], 1, [2])
    fault = r"sizes\[0, 0\] is 1 rows of table '0'; left are 1 keys and 2 values of 3 a row"
    with pytest.raises(tf.errors.InvalidArgumentError, match=fault):
        exchange_ops.pack_messages(own, [3])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"row_floats\[0\] is -1"):
        exchange_ops.pack_messages(own, [-1])
