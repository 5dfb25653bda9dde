"""Fuzzing of file readers with Hypothesis, and the invariants of every reader.

A reader returns rows or raises a clear error that names the file. It never raises another kind of
exception, hangs, or allocates far more memory than the size of the file.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Seconds for all tests in this folder together. 0 selects the bounded run.
SECONDS = float(os.environ.get("SLIPSTREAM_FUZZ_SECONDS", "0"))
CORPUS = Path(__file__).with_name("corpus")
MAX_BYTES = 64 << 20
# Address space allowed in addition to the current size of the process. Arrow's threads need some.
MAX_BYTES_OF_MEMORY = 6 << 30
TIMEOUT_SECONDS = 60

Change = tuple[str, int, int, bytes]
TOKENS = (
    *(
        b"",
        b"\n",
        b"\n\n",
        b"\r",
        b"\r\n",
        b"\t",
        b",",
        b":",
        b"::",
        b'"',
        b'""',
        b"|",
        b" ",
        b"\0",
    ),
    *(b"-1", b"0", b"1", b"6", b"99999999999999999999", b"9223372036854775807", b"1e400", b"nan"),
    *(
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"0x1f",
        b"null",
        b"{}",
        b"[]",
        b"true",
        b"\\ud800",
        b"../",
    ),
)


def changes() -> st.SearchStrategy[list[Change]]:
    """Returns a strategy for one to four changes to a file's content.

    See `changed`.
    """
    kind = st.sampled_from(("replace", "insert", "cut", "double", "end", "flip"))
    place = st.integers(0, (1 << 16) - 1)
    part = st.one_of(st.sampled_from(TOKENS), st.binary(max_size=12))
    return st.lists(st.tuples(kind, place, place, part), min_size=1, max_size=4)


def changed(content: bytes, drawn: list[Change]) -> bytes:
    """Returns the content with the changes applied.

    Positions are in units of 1/65536 of the length of the content.
    """
    for kind, begin, length, part in drawn:
        at = begin * (len(content) + 1) >> 16
        after = min(len(content), at + 1 + (length & 15 if length & 1 else length >> 6))
        if kind == "replace":
            content = content[:at] + part + content[at + len(part) :]
        elif kind == "insert":
            content = content[:at] + part + content[at:]
        elif kind == "cut":
            content = content[:at] + content[after:]
        elif kind == "double":
            content = content[:after] + content[at:]
        elif kind == "end":
            content = content[:at]
        elif at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << (length & 7)]) + content[at + 1 :]
    return content


def fuzz(
    draw: st.SearchStrategy[Any], check: Callable[[Any], None], cases: int, fraction: float
) -> None:
    """Checks `cases` random cases, and repeats while there is time.

    Args:
        draw: Strategy of the cases.
        check: Receives a case and raises an exception if the case fails.
        cases: Number of cases of one run. The bounded run consists of a single run.
        fraction: Fraction of SECONDS that this test may use.
    """
    end = time.monotonic() + SECONDS * fraction
    runs = 0
    while not runs or time.monotonic() < end:
        runs += 1
        run = settings(
            max_examples=cases,
            database=None,
            derandomize=not SECONDS,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )(given(draw)(check))
        run()


@contextlib.contextmanager
def bounded_space() -> Iterator[None]:
    """Limits the address space, so that absurd allocations fail."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MAX_BYTES_OF_MEMORY, before[1]))
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, before)


class Hang(BaseException):
    """Raised after a timeout.

    Derives from BaseException so that the code under test does not catch it.
    """


def _hang(*_: Any) -> None:
    raise Hang


@contextlib.contextmanager
def watched(max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Fails if the body takes too long or allocates too much memory."""
    before = signal.signal(signal.SIGALRM, _hang)
    signal.alarm(TIMEOUT_SECONDS)
    tracemalloc.reset_peak()
    begin = tracemalloc.get_traced_memory()[0]
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        taken = tracemalloc.get_traced_memory()[1] - begin
        assert taken < max_bytes, f"{taken} bytes were allocated"


def error_of(read: Callable[[], Any], *kinds: type[Exception], names: Path) -> Exception | None:
    """Calls `read` and returns its error.

    Args:
        read: Reads a file.
        kinds: Exact classes of the errors that are allowed. Subclasses are not allowed.
        names: Path that the error message must contain.

    Returns:
        The error, or None if reading succeeded.
    """
    with watched():
        try:
            read()
        except Exception as error:
            if type(error) not in kinds:
                raise
            assert str(names) in str(error), f"the message does not name {names}: {error}"
            return error
    return None
