"""distributed.link and .probe: what messages take, and which dtype is soonest."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, distributed
from slipstream_tf.distributed import probe
from slipstream_tf.distributed.sharded import ShardedStore
from slipstream_tf.link import WIRE_DTYPES, Link, copies_of

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


def test_a_row_goes_to_all_others_or_to_its_owner():
    assert [copies_of(ranks, is_spread=False) for ranks in (1, 2, 4)] == [0, 1, 3]
    assert [copies_of(ranks, is_spread=True) for ranks in (1, 2, 4)] == [0, 0.5, 0.75]


def test_what_a_link_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"bytes_per_second.*: 0"):
        Link(0)
    with pytest.raises(ValueError, match=r"latency.*: -1"):
        Link(1e6, -1)


def slow(comm, bytes_per_second, latency):
    """Makes a rank's messages take what a link does."""
    gather = comm.gather

    def gather_slowly(tensor, kind, name):
        received = gather(tensor, kind, name)
        time.sleep(latency + int(tf.size(tensor)) * (comm.size - 1) / bytes_per_second)
        return received

    comm.gather, comm.uncounted = gather_slowly, contextlib.nullcontext
    return comm


def test_a_link_is_measured_alike_on_all_ranks(run_as_ranks):
    links = run_as_ranks(3, lambda comm: probe.link_of(slow(comm, 1e8, 2e-3)))
    assert links[0] == links[1] == links[2]
    assert links[0].bytes_per_second == pytest.approx(1e8, rel=0.3)
    assert links[0].latency == pytest.approx(2e-3, rel=0.5)
    assert set(links[0].codec_seconds) == set(WIRE_DTYPES)
    assert all(0 < seconds < 1e-6 for seconds in links[0].codec_seconds.values())


def test_a_link_is_measured_once(run_as_ranks):
    def program(comm):
        first = probe.link_of(slow(comm, 1e9, 1e-4))
        return probe.link_of(comm) is first

    assert run_as_ranks(2, program) == [True, True]


def test_auto_is_what_the_link_says(run_as_ranks):
    def program(comm, speed):
        comm.link = Link(speed, 1e-3, CODEC)
        store = ShardedStore([Table("t", 64)], None, comm, wire_dtype="auto")
        return store.wire.rows, store.wire.gradients

    assert run_as_ranks(2, lambda comm: program(comm, 1e8)) == [("int8", "int8")] * 2
    assert run_as_ranks(2, lambda comm: program(comm, 1e11)) == [("float32", "float32")] * 2
    alone = distributed.SingleProcess()
    assert ShardedStore([Table("t", 64)], None, alone, wire_dtype="auto").wire.rows == "float32"


def test_replicated_tables_send_gradients_alone():
    with pytest.raises(ValueError, match="only gradients travel"):
        distributed.ReplicatedStore([Table("t", 2)], None, distributed.SingleProcess(), "int8,int8")


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
