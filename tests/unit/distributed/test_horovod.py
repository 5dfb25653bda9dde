"""Tests of single-process communication, launcher detection and CPU assignment of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tensorflow as tf

from slipstream_tf._utils import agent, comm
from slipstream_tf.distributed import horovod


def test_collectives_of_one_rank_return_input():
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
def test_unknown_kind_raises(call):
    with pytest.raises(ValueError, match=r"Invalid `kind`: 'gold' for x\. Expected one of 'keys'"):
        getattr(comm.SingleProcess(), call)(tf.zeros([1]), "gold", "x")


def test_splits_of_wrong_length_raise():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2\] is not compatible"):
        comm.SingleProcess().exchange(tf.zeros([3]), [1, 2], "rows", "x")


def test_process_without_launcher_is_single_process(monkeypatch):
    for name in agent.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert isinstance(horovod.init(), comm.SingleProcess)


def test_rank_without_horovod_names_install_command(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    with pytest.raises(ImportError, match=r"HOROVOD_RANK is set.*make horovod"):
        horovod.init()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_reaches_every_other_rank_once(size, root):
    sends = [horovod._ranks_below(rank, root, size) for rank in range(size)]
    assert sum(sends) == size - 1
    assert sends[root] == max(sends) == (size - 1).bit_length()


@pytest.mark.parametrize("timeout", [0, 0.5, float("nan"), "30"])
def test_timeout_out_of_range_raises(timeout):
    with pytest.raises(ValueError, match="Invalid `timeout_seconds`"):
        horovod.init(timeout_seconds=timeout)


ON_LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads of Linux")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_divide_processors_evenly(ranks: int) -> None:
    machine = [0, 1, 2, 3, 8, 9, 10]
    shares = [list(horovod.part_of(machine, rank, ranks)) for rank in range(ranks)]
    assert [one for fraction in shares for one in fraction] == machine
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_processors_use_all_processors() -> None:
    assert all(horovod.part_of([1, 3], rank, 3) == [1, 3] for rank in range(3))


def test_threads_of_core_are_adjacent(tmp_path: Path) -> None:
    # Two sockets with two cores of two threads each, numbered as Linux does.
    for number in range(8):
        folder = tmp_path / f"cpu{number}"
        folder.mkdir()
        (folder / "physical_package_id").write_text(f"{number // 2 % 2}\n")
        (folder / "core_id").write_text(f"{number % 2}\n")
    topology = str(tmp_path / "cpu{}")
    assert horovod.by_place(range(8), topology) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert horovod.by_place([5, 0, 2], topology) == [0, 5, 2]
    assert horovod.by_place([2, 1], str(tmp_path / "nowhere{}")) == [1, 2]


@ON_LINUX
def test_only_threads_started_in_context_have_low_priority() -> None:
    stop = threading.Event()
    before = threading.Thread(target=stop.wait)
    before.start()
    with horovod.background_priority():
        within = threading.Thread(target=stop.wait)
        within.start()
    after = threading.Thread(target=stop.wait)
    after.start()
    policies = [os.sched_getscheduler(one.native_id or 0) for one in (before, within, after)]
    stop.set()
    assert policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]


# Run in another process, because the CPU affinity is not restored.
PROGRAM = """
import json, os, sys, threading
from slipstream_tf.distributed import horovod
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
before = sorted(os.sched_getaffinity(0))
found = horovod.keep_to_part(int(sys.argv[1]), int(sys.argv[2]))
now = [sorted(os.sched_getaffinity(one)) for one in (0, thread.native_id)]
stop.set()
print(json.dumps([before, found, now]))
"""


def kept(rank: int, ranks: int, **environment: str) -> list[list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rank), str(ranks)],
        check=True, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@ON_LINUX
def test_all_threads_use_processors_of_rank() -> None:
    before, found, now = kept(1, 2)
    if len(before) < 2 or len(before) < (os.cpu_count() or 1):
        assert found is None and now == [before, before]
    else:
        assert now == [sorted(found), sorted(found)]
        assert found == horovod.by_place(before)[len(before) // 2 :]


@ON_LINUX
def test_user_thread_affinity_is_kept() -> None:
    before, found, now = kept(1, 2, HOROVOD_THREAD_AFFINITY="0,1")
    assert found is None and now == [before, before]
    before, found, now = kept(0, 1)
    assert found is None and now == [before, before]
