"""_utils.comm without Horovod: the communicator of one process."""

from __future__ import annotations

import sys

import pytest
import tensorflow as tf

from slipstream_tf._utils import agent, comm
from slipstream_tf.distributed import horovod


def test_collectives_of_one_rank_return_their_own_tensor():
    alone = comm.SingleProcess()
    rows = tf.reshape(tf.range(6.0), [3, 2])
    assert (alone.rank, alone.size, alone.local_rank) == (0, 1, 0)
    for result in (
        alone.sum(rows, "dense", "a"),
        alone.gather(rows, "rows", "b"),
        alone.broadcast(rows, 0, "control", "c"),
    ):
        tf.debugging.assert_equal(result, rows)
    received, splits = alone.exchange(rows, [3], "rows", "d")
    tf.debugging.assert_equal(received, rows)
    assert splits.numpy().tolist() == [3]
    alone.count_sent(tf.constant(8, tf.int64), "keys", "e")
    assert alone.traffic().total == 0 and set(alone.traffic().bytes) == set(comm.KINDS)


@pytest.mark.parametrize("call", ["sum", "gather", "count_sent"])
def test_an_unknown_kind_is_refused(call):
    with pytest.raises(ValueError, match=r"Invalid `kind`: 'gold' for x\. Allowed: one of 'keys'"):
        getattr(comm.SingleProcess(), call)(tf.zeros([1]), "gold", "x")


def test_splits_for_other_ranks_than_there_are():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2\] is not compatible"):
        comm.SingleProcess().exchange(tf.zeros([3]), [1, 2], "rows", "x")


def test_without_a_launcher_a_process_is_alone(monkeypatch):
    for name in agent.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert isinstance(horovod.init(), comm.SingleProcess)


def test_a_rank_without_horovod_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    with pytest.raises(ImportError, match=r"HOROVOD_RANK is set.*make horovod"):
        horovod.init()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("root", [0, 1])
def test_a_broadcast_reaches_every_other_rank_once(size, root):
    sends = [horovod._ranks_below(rank, root, size) for rank in range(size)]
    assert sum(sends) == size - 1
    assert sends[root] == max(sends) == (size - 1).bit_length()


@pytest.mark.parametrize("timeout", [0, 0.5, float("nan"), "30"])
def test_a_timeout_out_of_range_is_refused(timeout):
    with pytest.raises(ValueError, match="Invalid `timeout_seconds`"):
        horovod.init(timeout_seconds=timeout)
