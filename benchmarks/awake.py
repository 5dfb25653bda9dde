"""Keeps processors from being halted while something is measured.

A virtual machine halts a processor that has nothing to do, and its host may take a millisecond to
run it again: parallel sections of that length then take several times as long, those of libraries
whose threads spin between them less so. With `--awake` an idle-priority process per processor
spins, which every other process interrupts at once.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys

from absl import flags

_AWAKE = flags.DEFINE_boolean(
    "awake", False, "Keep processors from being halted, of a virtual machine (Linux)."
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
    """Keeps all processors that this process may use awake until it ends, if `--awake` asks for it.

    Returns:
        Whether it does.
    """
    if _AWAKE.value:
        for processor in os.sched_getaffinity(0):
            command = [sys.executable, "-S", "-c", _SPIN, str(processor), str(os.getpid())]
            atexit.register(subprocess.Popen(command).kill)
    return _AWAKE.value
