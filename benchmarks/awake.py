"""Keeps processors awake during a measurement.

A virtual machine halts an idle processor, and its host can take a millisecond to resume it. Short
parallel sections then take much longer. Libraries with threads that spin between sections are less
affected. With `--awake`, an idle-priority process spins on each processor. Any other process
preempts it immediately.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys

from absl import flags

_AWAKE = flags.DEFINE_boolean(
    "awake",
    False,
    "Keep the processors of a virtual machine awake with idle-priority processes (Linux).",
)

_SPIN = """
import os, sys
processor, parent = map(int, sys.argv[1:])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {processor})
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def keep() -> bool:
    """Keeps processors awake until the process ends, if `--awake` is set.

    Returns:
        Whether `--awake` is set.
    """
    if _AWAKE.value:
        for processor in os.sched_getaffinity(0):
            command = [sys.executable, "-S", "-c", _SPIN, str(processor), str(os.getpid())]
            atexit.register(subprocess.Popen(command).kill)
    return _AWAKE.value
