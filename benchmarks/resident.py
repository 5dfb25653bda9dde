"""Memory that this process holds, as the system counts it (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os


def resident_bytes() -> int | None:
    """Returns the process's resident memory; None where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def return_free_memory() -> int | None:
    """Gives what the C library keeps for later back to the system; returns `resident_bytes`."""
    # Other C libraries than glibc have no such function.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()
