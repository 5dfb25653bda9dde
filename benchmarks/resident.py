"""Resident memory of this process on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os


def resident_bytes() -> int | None:
    """Returns the resident memory of the process in bytes; None if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def return_free_memory() -> int | None:
    """Returns freed memory to the system, then returns `resident_bytes`."""
    # Only glibc has this function.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()
