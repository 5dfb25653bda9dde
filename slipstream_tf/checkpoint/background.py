"""Work that goes on beside training: one piece at a time, whose error is raised later."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one piece of work at a time in a thread; the process does not end before it is done."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Starts a piece of work; `wait` for the one before first."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # No daemon: Python waits for it before it ends.
        self._thread = threading.Thread(target=run, name="slipstream-checkpoint")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the work to end, and raises its error once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
