"""distributed.processors: shares of a machine, and threads that give way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream_tf.distributed import horovod

ON_LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads of Linux")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_share_out_a_machine(ranks: int) -> None:
    machine = [0, 1, 2, 3, 8, 9, 10]
    shares = [list(horovod.share_of(machine, rank, ranks)) for rank in range(ranks)]
    assert [one for share in shares for one in share] == machine
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_processors_share_all() -> None:
    assert all(horovod.share_of([1, 3], rank, 3) == [1, 3] for rank in range(3))


def test_threads_of_a_core_are_neighbours(tmp_path: Path) -> None:
    # Two sockets of two cores with two threads each, numbered as Linux does.
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
def test_threads_that_begin_give_way_and_others_do_not() -> None:
    stop = threading.Event()
    before = threading.Thread(target=stop.wait)
    before.start()
    with horovod.giving_way():
        within = threading.Thread(target=stop.wait)
        within.start()
    after = threading.Thread(target=stop.wait)
    after.start()
    policies = [os.sched_getscheduler(one.native_id or 0) for one in (before, within, after)]
    stop.set()
    assert policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]


# Another process: its affinity is not given back.
PROGRAM = """
import json, os, sys, threading
from slipstream_tf.distributed import horovod
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
before = sorted(os.sched_getaffinity(0))
found = horovod.keep_to_share(int(sys.argv[1]), int(sys.argv[2]))
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
def test_all_threads_keep_to_the_share() -> None:
    before, found, now = kept(1, 2)
    if len(before) < 2 or len(before) < (os.cpu_count() or 1):
        assert found is None and now == [before, before]
    else:
        assert now == [sorted(found), sorted(found)]
        assert found == horovod.by_place(before)[len(before) // 2 :]


@ON_LINUX
def test_what_somebody_has_chosen_stays() -> None:
    before, found, now = kept(1, 2, HOROVOD_THREAD_AFFINITY="0,1")
    assert found is None and now == [before, before]
    before, found, now = kept(0, 1)
    assert found is None and now == [before, before]
