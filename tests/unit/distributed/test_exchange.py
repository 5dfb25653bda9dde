"""distributed.exchange: names of collectives, and what travels."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf._utils.comm import WIRE_DTYPES, Names, encoded_bytes
from slipstream_tf.distributed import SingleProcess, exchange
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.exchange import SendBuffer


def test_eager_calls_of_one_collective_have_one_name():
    names = Names("test_eager")
    assert [names.of("a"), names.of("b"), names.of("a")] == [
        "slipstream.test_eager.a",
        "slipstream.test_eager.b",
        "slipstream.test_eager.a",
    ]


def test_objects_with_one_prefix_are_numbered():
    first, second = Names("test_numbers"), Names("test_numbers")
    assert first.of("a") == "slipstream.test_numbers.a"
    assert second.of("a") == "slipstream.test_numbers.1.a"


def test_every_graph_numbers_its_collectives_anew():
    names, seen = Names("test_graphs"), []

    @tf.function
    def step(x):
        seen.append([names.of("a"), names.of("a"), names.of("b")])
        return x

    step(tf.zeros([1]))
    step(tf.zeros([2]))  # traced again
    prefix = "slipstream.test_graphs"
    assert seen == [[f"{prefix}.a", f"{prefix}.a-1", f"{prefix}.b"]] * 2


def test_values_are_rounded_after_the_warmup():
    wire = exchange.Wire.of("bfloat16,int8", warmup_steps=2)
    assert wire == exchange.Wire("bfloat16", "int8", 2)

    @tf.function
    def dtypes(step):
        return wire.dtype_of(wire.rows, step), wire.dtype_of(wire.gradients, step)

    got = [[int(dtype) for dtype in dtypes(tf.constant(step))] for step in range(4)]
    assert got == [[0, 0], [0, 0], [1, 3], [1, 3]]
    assert exchange.Wire.of("float16") == exchange.Wire("float16", "float16")
    assert exchange.Wire.of("float16").dtype_of("float16", tf.constant(0)) == 2
    assert exchange.Wire.of("float32", warmup_steps=2).dtype_of("float32", tf.constant(3)) == 0


def rows_of(sizes, keys, values) -> SendBuffer:
    return SendBuffer(
        tf.constant([sizes], tf.int64), tf.constant(keys, tf.int64), tf.constant(values, tf.float32)
    )


def test_rows_of_one_process_stay_where_they_are():
    own = rows_of([1, 0], [4], [1.0, 2.0])
    names = Names("test_alone")
    got = exchange.gather_rows(SingleProcess(), own, [2, 1], names, "rows", "gradients", 1)
    assert got is own


@pytest.mark.parametrize("wrong", ["float64", "", "int8,", ",int8", "int8,int8,int8", None])
def test_settings_of_the_wire_are_checked(wrong):
    with pytest.raises(ValueError, match=r"wire_dtype.*Allowed: one of 'float32', 'bfloat16'"):
        exchange.Wire.of(wrong)


def test_steps_of_the_wire_are_checked():
    with pytest.raises(ValueError, match=r"wire_warmup_steps.*-1"):
        exchange.Wire.of("bfloat16", warmup_steps=-1)


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_values_travel_as_their_dtype_has_them(run_as_ranks, dtype):
    values = np.float32([1.0, 1.0 + 2**-6, 1.0 + 2**-12, -3e4])
    own, names = rows_of([2], [4, 5], values), Names(f"test_rounding_{dtype}")
    number = WIRE_DTYPES.index(dtype)
    # In two rows: an int8 is one of the two 127th parts next to it.
    allowed = {
        "float32": [0, 0, 0, 0],
        "bfloat16": [0, 0, 2**-12, 3e4 * 2**-9],
        "float16": [0, 0, 2**-12, 0],
        "int8": [1.1 / 127, 1e-6, 3e4 / 127, 0.01],
    }[dtype]

    def program(comm, wire_dtype):
        return exchange.gather_rows(comm, own, [2], names, "rows", "gradients", wire_dtype)

    for wire_dtype in (number, tf.constant(number)):
        ranks = run_as_ranks(2, lambda comm, it=wire_dtype: program(comm, it))
        assert ranks[0].values.numpy().tolist() == ranks[1].values.numpy().tolist()
        for of_rank in np.split(ranks[0].values.numpy(), 2):
            assert (abs(of_rank - values) <= allowed).all()


def test_all_ranks_get_the_rows_of_all(run_as_ranks):
    sent = [rows_of([1, 1], [4, 5], [1, 2, 3]), rows_of([0, 0], [], []), rows_of([0, 1], [6], [4])]
    names = Names("test_rows")

    def program(comm):
        own = sent[comm.rank]
        return exchange.gather_rows(comm, own, [2, 1], names, "rows", "gradients", 1)

    for got in run_as_ranks(3, program):
        assert got.sizes.numpy().tolist() == [[1, 1], [0, 0], [0, 1]]
        assert got.keys.numpy().tolist() == [4, 5, 6]
        assert got.values.numpy().tolist() == [1, 2, 3, 4]


def test_each_rank_gets_what_is_meant_for_it(run_as_ranks):
    names = Names("test_owners")

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
    for kind, wire_dtype, wanted in (
        ("gradients", 0, [24, 20]),
        ("gradients", tf.constant(1), [24, 10]),
        ("gradients", 3, [24, 17]),
        (["gradients", "deferred"], tf.constant(3), [24, 12, 5]),
    ):
        mixed = exchange._kinds_of(own.sizes[0], [2, 1], kind, wire_dtype)
        assert [int(nbytes) for _, nbytes in mixed.parts] == wanted
        assert [name for name, _ in mixed.parts[1:]] == ([kind] if kind == "gradients" else kind)


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_a_row_takes_as_many_bytes_as_are_counted(dtype):
    random = np.random.default_rng(0)
    sizes, values = [40, 30, 0], random.normal(size=40 * 16 + 30 * 5)
    own = rows_of(sizes, range(70), values)
    number = WIRE_DTYPES.index(dtype)
    # Of another third table each time: lengths are those of the call before, of the same tables.
    _, lengths = exchange_ops.pack_messages(own, [16, 5, 7 + number], number)
    counted = sum(
        size * (8 + encoded_bytes(dtype, dim)) for size, dim in zip(sizes, [16, 5, 7], strict=True)
    )
    header = 8 * (2 + 3)
    # A 32nd is spare, and the length is one of whole words.
    wanted = max(counted + header + (counted + header) // 32, 1024)
    assert lengths.numpy().tolist() == [-(-wanted // 8) * 8]


def test_messages_that_are_damaged_are_refused():
    own = rows_of([1], [4], [1.0, 2.0])
    message, lengths = exchange_ops.pack_messages(own, [2])
    assert lengths.numpy().tolist() == [message.shape[0]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="the message of rank 0 has a length"):
        exchange_ops.unpack_messages(message[:-8], 1, [2])
    fault = r"sizes\[0, 0\] is 1 rows of table '0'; left are 1 keys and 2 values of 3 a row"
    with pytest.raises(tf.errors.InvalidArgumentError, match=fault):
        exchange_ops.pack_messages(own, [3])
    for wrong in (-1, 4):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"wire_dtype is {wrong}"):
            exchange_ops.pack_messages(own, [2], wrong)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"row_floats\[0\] is -1"):
        exchange_ops.pack_messages(own, [-1])
