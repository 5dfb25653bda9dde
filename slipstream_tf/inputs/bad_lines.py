"""Lines that cannot be read: counted, the first one named once with file and line, skipped.

Strict readers raise instead, at the first such line.
"""

from __future__ import annotations

import dataclasses

from absl import logging


class BadLineError(ValueError):
    """A malformed line in a strict reader; the message names file, line and value."""


@dataclasses.dataclass
class BadLines:
    """Tally of one pass over the data.

    Attributes:
        strict: raise BadLineError at the first bad line.
        count: bad lines so far.
        first: "file:line: reason" of the first one, or None.
    """

    strict: bool = False
    count: int = 0
    first: str | None = None

    def add(self, path: str, line: int, reason: str) -> None:
        """Notes a bad line.

        Args:
            path: file it is in.
            line: its number, from 1.
            reason: what is wrong with it, with the value and what is allowed.

        Raises:
            BadLineError: `strict` is set.
        """
        message = f"{path}:{line}: {reason}"
        if self.strict:
            raise BadLineError(message)
        self.count += 1
        if self.first is None:
            self.first = message

    def report(self) -> None:
        """Logs the tally, if there is anything to say. Called once at the end of a pass."""
        if self.count:
            logging.warning(
                "%d malformed lines were left out. The first: %s", self.count, self.first
            )

    def reset(self) -> None:
        """Starts a new pass."""
        self.count = 0
        self.first = None
