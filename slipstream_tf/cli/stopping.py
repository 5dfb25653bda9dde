"""SIGTERM to a program that saves checkpoints: it finishes its step, saves, and ends.

In: the signal, as systems send it before they take a machine away. Out: whether it has come.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stop:
    """Whether SIGTERM has come while `noticing` was at work."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.is_asked = False

    @contextlib.contextmanager
    def noticing(self) -> Iterator[None]:
        """Notes SIGTERM, instead of ending the process; does nothing beside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.is_asked = True
