"""Appends the records of benchmark cases to a JSON Lines file."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Results:
    """Writes one record per case, with its duration or its error.

    A failed case does not stop the program. It sets `exit_code` to 1.

    Args:
        path: Path of the file to append to.
    """

    def __init__(self, path: Path):
        self._path = path
        self.exit_code = 0

    @contextlib.contextmanager
    def case(self, record: str, name: str) -> Iterator[dict[str, Any]]:
        """Yields a dictionary for results and then writes it.

        The record also contains the duration, and the error of a failed case.
        """
        start, found = time.perf_counter(), {"record": record, "name": name}
        try:
            yield found
        except Exception as error:
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"
            self.exit_code = 1
        found["seconds_in_all"] = time.perf_counter() - start
        self.write(found)

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record and prints it."""
        line = json.dumps(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)
