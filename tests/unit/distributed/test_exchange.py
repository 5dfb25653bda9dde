"""Tests of row exchange between ranks: names, messages and wire dtypes."""

from __future__ import annotations

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, distributed
from slipstream_tf._utils.comm import WIRE_DTYPES, CollectiveNames, Link, copies_of, encoded_bytes
from slipstream_tf.distributed import SingleProcess, exchange
from slipstream_tf.distributed.sharded import ShardedStore
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.exchange import SendBuffer


def test_eager_calls_of_collective_share_name():
    names = CollectiveNames("test_eager")
    assert [names.of("a"), names.of("b"), names.of("a")] == [
        "slipstream.test_eager.a",
        "slipstream.test_eager.b",
        "slipstream.test_eager.a",
    ]


def test_objects_with_one_prefix_are_numbered():
    first, second = CollectiveNames("test_numbers"), CollectiveNames("test_numbers")
    assert first.of("a") == "slipstream.test_numbers.a"
    assert second.of("a") == "slipstream.test_numbers.1.a"


def test_every_graph_numbers_collectives_from_scratch():
    names, seen = CollectiveNames("test_graphs"), []

    @tf.function
    def step(x):
        seen.append([names.of("a"), names.of("a"), names.of("b")])
        return x

    step(tf.zeros([1]))
    step(tf.zeros([2]))  # A new shape traces the function again.
    prefix = "slipstream.test_graphs"
    assert seen == [[f"{prefix}.a", f"{prefix}.a-1", f"{prefix}.b"]] * 2


def test_values_are_rounded_after_warmup():
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


def test_single_process_rows_are_not_moved():
    own = rows_of([1, 0], [4], [1.0, 2.0])
    names = CollectiveNames("test_alone")
    got = exchange.exchange_rows(SingleProcess(), own, [2, 1], names, "rows", "gradients", 1, False)
    assert got is own


@pytest.mark.parametrize("wrong", ["float64", "", "int8,", ",int8", "int8,int8,int8", None])
def test_wire_settings_are_validated(wrong):
    with pytest.raises(ValueError, match=r"wire_dtype.*Expected one of 'float32', 'bfloat16'"):
        exchange.Wire.of(wrong)


def test_wire_warmup_steps_are_validated():
    with pytest.raises(ValueError, match=r"wire_warmup_steps.*-1"):
        exchange.Wire.of("bfloat16", warmup_steps=-1)


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_exchanged_values_have_wire_dtype_precision(run_as_ranks, dtype):
    values = np.float32([1.0, 1.0 + 2**-6, 1.0 + 2**-12, -3e4])
    own, names = rows_of([2], [4, 5], values), CollectiveNames(f"test_rounding_{dtype}")
    number = WIRE_DTYPES.index(dtype)
    # With two rows of two values, int8 rounds to one of the two adjacent multiples of max / 127.
    allowed = {
        "float32": [0, 0, 0, 0],
        "bfloat16": [0, 0, 2**-12, 3e4 * 2**-9],
        "float16": [0, 0, 2**-12, 0],
        "int8": [1.1 / 127, 1e-6, 3e4 / 127, 0.01],
    }[dtype]

    def program(comm, wire_dtype):
        return exchange.exchange_rows(comm, own, [2], names, "rows", "gradients", wire_dtype, False)

    for wire_dtype in (number, tf.constant(number)):
        ranks = run_as_ranks(2, lambda comm, it=wire_dtype: program(comm, it))
        assert ranks[0].values.numpy().tolist() == ranks[1].values.numpy().tolist()
        for of_rank in np.split(ranks[0].values.numpy(), 2):
            assert (abs(of_rank - values) <= allowed).all()


def test_all_ranks_receive_all_rows(run_as_ranks):
    sent = [rows_of([1, 1], [4, 5], [1, 2, 3]), rows_of([0, 0], [], []), rows_of([0, 1], [6], [4])]
    names = CollectiveNames("test_rows")

    def program(comm):
        own = sent[comm.rank]
        return exchange.exchange_rows(comm, own, [2, 1], names, "rows", "gradients", 1, False)

    for got in run_as_ranks(3, program):
        assert got.sizes.numpy().tolist() == [[1, 1], [0, 0], [0, 1]]
        assert got.keys.numpy().tolist() == [4, 5, 6]
        assert got.values.numpy().tolist() == [1, 2, 3, 4]


def test_each_rank_receives_rows_addressed_to_it(run_as_ranks):
    names = CollectiveNames("test_owners")

    def program(comm):
        # Each rank sends one row of each table to rank 0, and two rows of the second table to rank
        # 1.
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


def test_bytes_are_counted_by_kind():
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
def test_counted_bytes_equal_row_bytes(dtype):
    random = np.random.default_rng(0)
    sizes, values = [40, 30, 0], random.normal(size=40 * 16 + 30 * 5)
    own = rows_of(sizes, range(70), values)
    number = WIRE_DTYPES.index(dtype)
    # Use a different third table for each dtype, because lengths are reused between calls with the
    # same tables.
    _, lengths = exchange_ops.pack_messages(own, [16, 5, 7 + number], number)
    counted = sum(
        size * (8 + encoded_bytes(dtype, dim)) for size, dim in zip(sizes, [16, 5, 7], strict=True)
    )
    header = 8 * (2 + 3)
    # The length has 1/32 of headroom and is a multiple of 8 bytes.
    wanted = max(counted + header + (counted + header) // 32, 1024)
    assert lengths.numpy().tolist() == [-(-wanted // 8) * 8]


def test_damaged_messages_raise():
    own = rows_of([1], [4], [1.0, 2.0])
    message, lengths = exchange_ops.pack_messages(own, [2])
    assert lengths.numpy().tolist() == [message.shape[0]]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="the message from rank 0 has the length"
    ):
        exchange_ops.unpack_messages(message[:-8], 1, [2])
    fault = (
        r"sizes\[0, 0\] is 1 rows of table '0' with 3 values each; .* "
        "remaining 1 keys and 2 values"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=fault):
        exchange_ops.pack_messages(own, [3])
    for wrong in (-1, 4):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"wire_dtype is {wrong}"):
            exchange_ops.pack_messages(own, [2], wrong)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"row_floats\[0\] is -1"):
        exchange_ops.pack_messages(own, [-1])


# Seconds per value, measured on one machine.
CODEC = dict(zip(WIRE_DTYPES, [0.2e-9, 0.4e-9, 0.6e-9, 0.9e-9], strict=True))


def test_message_seconds_include_transfer_and_coding():
    link = Link(1e6, 1e-3, {"int8": 1e-7})
    # Ten rows of 16 values, each with a key of 8 bytes and a scale of 4 bytes.
    assert link.seconds(10, 16, "int8") == pytest.approx(10 * (8 + 4 + 16) / 1e6 + 160e-7)
    assert link.seconds(10, 16, "float32", copies=3) == pytest.approx(3 * 10 * (8 + 64) / 1e6)
    assert link.seconds(10, 0, "int8") == pytest.approx(80 / 1e6)


@pytest.mark.parametrize(
    "bytes_per_second, floats, wanted",
    [
        (1e8, 64, "int8"),
        (1e8, 16, "int8"),
        (1e8, 1, "float32"),  # The key is most of the row.
        (1e10, 64, "float32"),  # The link is as fast as memory.
        (1.25e9, 64, "bfloat16"),
        (2.5e9, 64, "float32"),  # Encoding as bfloat16 would save too little time.
    ],
)
def test_fastest_dtype_is_chosen(bytes_per_second, floats, wanted):
    assert Link(bytes_per_second, 1e-4, CODEC).choose(floats) == wanted


def test_fastest_dtype_depends_on_number_of_receivers():
    ten_gigabits = Link(1.25e9, 1e-4, CODEC)
    chosen = [ten_gigabits.choose(64, copies) for copies in (0.5, 1, 7)]
    assert chosen == ["float32", "bfloat16", "bfloat16"]


def test_row_is_sent_to_all_ranks_or_to_owner():
    assert [copies_of(ranks, is_spread=False) for ranks in (1, 2, 4)] == [0, 1, 3]
    assert [copies_of(ranks, is_spread=True) for ranks in (1, 2, 4)] == [0, 0.5, 0.75]


def test_invalid_link_raises():
    with pytest.raises(ValueError, match=r"bytes_per_second.*: 0"):
        Link(0)
    with pytest.raises(ValueError, match=r"latency.*: -1"):
        Link(1e6, -1)


class Clock(threading.local):
    """Clock of a rank (a thread) that advances a microsecond per reading."""

    now = 0.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(exchange, "time", made := Clock())
    return made


def slow(comm, clock, bytes_per_second, latency):
    """Delays a rank's messages on the fake clock like a slow link."""
    gather = comm.gather

    def gather_slowly(tensor, kind, name):
        clock.now += latency + int(tf.size(tensor)) * (comm.size - 1) / bytes_per_second
        return gather(tensor, kind, name)

    comm.gather, comm.uncounted = gather_slowly, contextlib.nullcontext
    return comm


def test_link_measurement_is_equal_on_all_ranks(run_as_ranks, clock):
    def program(comm):
        # The other ranks measure different times.
        return exchange.link_of(slow(comm, clock, 1e8, 1e-3 * (1 + comm.rank)))

    links = run_as_ranks(3, program)
    assert links[0] == links[1] == links[2]
    assert links[0].bytes_per_second == pytest.approx(1e8, rel=1e-3)
    assert links[0].latency == pytest.approx(2e-3, rel=0.02)
    coded = [1e-6 / (8192 * 32)] * len(WIRE_DTYPES)
    assert list(links[0].codec_seconds) == list(WIRE_DTYPES)
    assert list(links[0].codec_seconds.values()) == pytest.approx(coded)


def test_link_is_measured_once(run_as_ranks, clock):
    def program(comm):
        first = exchange.link_of(slow(comm, clock, 1e9, 1e-4))
        return exchange.link_of(comm) is first

    assert run_as_ranks(2, program) == [True, True]
    single = distributed.SingleProcess()
    with pytest.raises(ValueError, match=r"`comm.size`: 1 for link_of\. Expected at least 2 ranks"):
        exchange.link_of(single)
    single.link = Link(1e8, 1e-3, CODEC)
    assert exchange.link_of(single) is single.link


def test_ranks_with_different_settings_do_not_deadlock(run_as_ranks):
    def other_dtypes(comm):
        ShardedStore([Table("t", 4)], None, comm, wire_dtype="auto" if comm.rank else "float32")

    def other_links(comm):
        comm.link = Link(1e8, 1e-3, CODEC) if comm.rank else None
        ShardedStore([Table("t", 4)], None, comm, wire_dtype="auto")

    for program, what in ((other_dtypes, "wire_dtype"), (other_links, "distributed.init")):
        for error in run_as_ranks(2, program):
            assert isinstance(error, ValueError) and what in str(error)


def test_tape_in_function_requires_known_link():
    class Two(distributed.SingleProcess):
        size = 2

    comm = Two()

    @tf.function
    def step():
        with distributed.DistributedGradientTape(tf.GradientTape(), comm=comm, wire_dtype="auto"):
            return tf.constant(1.0)

    with pytest.raises(ValueError, match=r"`wire_dtype`: 'auto'.*link_of\(comm\) before"):
        step()
    comm.link = Link(1e8, 1e-3, CODEC)
    assert float(step()) == 1.0


def test_auto_dtype_follows_link_speed(run_as_ranks):
    def program(comm, speed):
        comm.link = Link(speed, 1e-3, CODEC)
        store = ShardedStore([Table("t", 64)], None, comm, wire_dtype="auto")
        return store.wire.rows, store.wire.gradients

    assert run_as_ranks(2, lambda comm: program(comm, 1e8)) == [("int8", "int8")] * 2
    assert run_as_ranks(2, lambda comm: program(comm, 1e11)) == [("float32", "float32")] * 2
    alone = distributed.SingleProcess()
    assert ShardedStore([Table("t", 64)], None, alone, wire_dtype="auto").wire.rows == "float32"


def test_two_wire_dtypes_raise_if_only_gradients_are_sent():
    alone = distributed.SingleProcess()
    with pytest.raises(ValueError, match="only gradients are sent"):
        distributed.ReplicatedStore([Table("t", 2)], None, alone, "int8,int8")
    with pytest.raises(ValueError, match="only gradients are sent"):
        distributed.DistributedOptimizer(keras.optimizers.SGD(), alone, wire_dtype="int8,float32")


def test_int8_rounding_scales_with_largest_value(run_as_ranks):
    def program(comm):
        store = ShardedStore([Table("t", 4)], None, comm, wire_dtype="int8,float32")
        rows = np.float32([[0.5, -1.0, 0.25, 0.001]])
        store.write_rows("t", np.array([7]), rows)
        from slipstream_tf.ops.features import FeatureSpec, pack

        specs = [FeatureSpec("f", "t")]
        (got,), _ = store.lookup(pack({"f": tf.constant([7])}, specs), training=False)
        return np.abs(got.numpy() - rows).max()

    assert all(0 < error <= 1 / 254 for error in run_as_ranks(2, program))
