"""distributed.link and .probe: what messages take, and which dtype is soonest."""

from __future__ import annotations

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, distributed
from slipstream_tf._utils.comm import WIRE_DTYPES, Link, copies_of
from slipstream_tf.distributed import exchange
from slipstream_tf.distributed.sharded import ShardedStore

# As measured on one machine: nanoseconds for a value.
CODEC = dict(zip(WIRE_DTYPES, [0.2e-9, 0.4e-9, 0.6e-9, 0.9e-9], strict=True))


def test_a_message_takes_its_bytes_and_the_coding_of_its_values():
    link = Link(1e6, 1e-3, {"int8": 1e-7})
    # Ten rows of 16 values: keys of 8 bytes, a scale of 4.
    assert link.seconds(10, 16, "int8") == pytest.approx(10 * (8 + 4 + 16) / 1e6 + 160e-7)
    assert link.seconds(10, 16, "float32", copies=3) == pytest.approx(3 * 10 * (8 + 64) / 1e6)
    assert link.seconds(10, 0, "int8") == pytest.approx(80 / 1e6)


@pytest.mark.parametrize(
    "bytes_per_second, floats, wanted",
    [
        (1e8, 64, "int8"),
        (1e8, 16, "int8"),
        (1e8, 1, "float32"),  # the key is most of it
        (1e10, 64, "float32"),  # as fast as memory
        (1.25e9, 64, "bfloat16"),
        (2.5e9, 64, "float32"),  # half of the time, of next to nothing
    ],
)
def test_the_dtype_that_is_soonest_is_chosen(bytes_per_second, floats, wanted):
    assert Link(bytes_per_second, 1e-4, CODEC).choose(floats) == wanted


def test_what_is_soonest_depends_on_how_many_a_row_goes_to():
    ten_gigabits = Link(1.25e9, 1e-4, CODEC)
    chosen = [ten_gigabits.choose(64, copies) for copies in (0.5, 1, 7)]
    assert chosen == ["float32", "bfloat16", "bfloat16"]


def test_a_row_goes_to_all_others_or_to_its_owner():
    assert [copies_of(ranks, is_spread=False) for ranks in (1, 2, 4)] == [0, 1, 3]
    assert [copies_of(ranks, is_spread=True) for ranks in (1, 2, 4)] == [0, 0.5, 0.75]


def test_what_a_link_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"bytes_per_second.*: 0"):
        Link(0)
    with pytest.raises(ValueError, match=r"latency.*: -1"):
        Link(1e6, -1)


class Clock(threading.local):
    """Of a rank, a thread: each look at it takes a microsecond."""

    now = 0.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(exchange, "time", made := Clock())
    return made


def slow(comm, clock, bytes_per_second, latency):
    """Makes a rank's messages take what a link does, by the clock."""
    gather = comm.gather

    def gather_slowly(tensor, kind, name):
        clock.now += latency + int(tf.size(tensor)) * (comm.size - 1) / bytes_per_second
        return gather(tensor, kind, name)

    comm.gather, comm.uncounted = gather_slowly, contextlib.nullcontext
    return comm


def test_a_link_is_measured_alike_on_all_ranks(run_as_ranks, clock):
    def program(comm):
        # Others take another time.
        return exchange.link_of(slow(comm, clock, 1e8, 1e-3 * (1 + comm.rank)))

    links = run_as_ranks(3, program)
    assert links[0] == links[1] == links[2]
    assert links[0].bytes_per_second == pytest.approx(1e8, rel=1e-3)
    assert links[0].latency == pytest.approx(2e-3, rel=0.02)
    coded = [1e-6 / (8192 * 32)] * len(WIRE_DTYPES)
    assert list(links[0].codec_seconds) == list(WIRE_DTYPES)
    assert list(links[0].codec_seconds.values()) == pytest.approx(coded)


def test_a_link_is_measured_once(run_as_ranks, clock):
    def program(comm):
        first = exchange.link_of(slow(comm, clock, 1e9, 1e-4))
        return exchange.link_of(comm) is first

    assert run_as_ranks(2, program) == [True, True]


def test_ranks_that_were_given_other_settings_do_not_wait_for_each_other(run_as_ranks):
    def other_dtypes(comm):
        ShardedStore([Table("t", 4)], None, comm, wire_dtype="auto" if comm.rank else "float32")

    def other_links(comm):
        comm.link = Link(1e8, 1e-3, CODEC) if comm.rank else None
        ShardedStore([Table("t", 4)], None, comm, wire_dtype="auto")

    for program, what in ((other_dtypes, "wire_dtype"), (other_links, "distributed.init")):
        for error in run_as_ranks(2, program):
            assert isinstance(error, ValueError) and what in str(error)


def test_a_tape_in_a_function_needs_a_link_that_is_known():
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


def test_auto_is_what_the_link_says(run_as_ranks):
    def program(comm, speed):
        comm.link = Link(speed, 1e-3, CODEC)
        store = ShardedStore([Table("t", 64)], None, comm, wire_dtype="auto")
        return store.wire.rows, store.wire.gradients

    assert run_as_ranks(2, lambda comm: program(comm, 1e8)) == [("int8", "int8")] * 2
    assert run_as_ranks(2, lambda comm: program(comm, 1e11)) == [("float32", "float32")] * 2
    alone = distributed.SingleProcess()
    assert ShardedStore([Table("t", 64)], None, alone, wire_dtype="auto").wire.rows == "float32"


def test_where_gradients_alone_travel_there_is_one_dtype():
    alone = distributed.SingleProcess()
    with pytest.raises(ValueError, match="only gradients travel"):
        distributed.ReplicatedStore([Table("t", 2)], None, alone, "int8,int8")
    with pytest.raises(ValueError, match="only gradients travel"):
        distributed.DistributedOptimizer(keras.optimizers.SGD(), alone, wire_dtype="int8,float32")


def test_rows_are_rounded_by_their_largest_value(run_as_ranks):
    def program(comm):
        store = ShardedStore([Table("t", 4)], None, comm, wire_dtype="int8,float32")
        rows = np.float32([[0.5, -1.0, 0.25, 0.001]])
        store.write_rows("t", np.array([7]), rows)
        from slipstream_tf.ops.features import FeatureSpec, pack

        specs = [FeatureSpec("f", "t")]
        (got,), _ = store.lookup(pack({"f": tf.constant([7])}, specs), specs, training=False)
        return np.abs(got.numpy() - rows).max()

    assert all(0 < error <= 1 / 254 for error in run_as_ranks(2, program))
