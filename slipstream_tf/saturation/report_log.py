"""The reports of all windows so far, the older ones packed: a run of weeks has many.

In: reports, one per window. Out: the same, in order. A report of 26 tables takes 35 kB as objects,
and a thirteenth of that packed, in memory and in checkpoints.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from slipstream_tf.saturation.report import WindowReport

BLOCK = 128
# Of a block that is unpacked, 8 MiB a report (that of 17,000 tables): no file is believed more.
_MOST_BYTES = BLOCK << 23


class ReportLog:
    """Appends reports; those before the last `BLOCK` to `2 * BLOCK` are kept packed.

    Attributes:
        inputs_skipped: in all of these windows.
    """

    def __init__(self) -> None:
        """Has no report."""
        self._packed: list[np.ndarray] = []
        self._recent: list[WindowReport] = []
        self.inputs_skipped = 0

    def __len__(self) -> int:
        """Returns the number of windows that have ended."""
        return BLOCK * len(self._packed) + len(self._recent)

    def __iter__(self) -> Iterator[WindowReport]:
        """Gives all reports, the first window's first."""
        for block in self._packed:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(block.tobytes(), _MOST_BYTES)
            if unpacker.unconsumed_tail:
                raise ValueError(f"Packed reports take more than {_MOST_BYTES} bytes.")
            yield from map(WindowReport.from_state, json.loads(text))
        yield from self._recent

    def append(self, report: WindowReport) -> None:
        """Takes the report of the window that has just ended."""
        self._recent.append(report)
        self.inputs_skipped += report.inputs_skipped
        if len(self._recent) == 2 * BLOCK:
            states = [old.state() for old in self._recent[:BLOCK]]
            text = json.dumps(states, default=lambda value: value.item())
            self._packed.append(np.frombuffer(zlib.compress(text.encode()), np.uint8))
            del self._recent[:BLOCK]

    def state(self) -> dict[str, Any]:
        """Returns all reports: nested dictionaries and lists of JSON-serialisable values, arrays.

        Returns:
            "windows": how many; "packed": uint8 [bytes] per block; "recent": the others;
            "inputs_skipped".
        """
        return {
            "windows": len(self),
            "packed": list(self._packed),
            "recent": [report.state() for report in self._recent],
            "inputs_skipped": self.inputs_skipped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ReportLog:
        """Returns the reports that `state` was had of."""
        log = cls()
        log._packed = [np.asarray(block, np.uint8) for block in state["packed"]]
        log._recent = [WindowReport.from_state(report) for report in state["recent"]]
        log.inputs_skipped = state["inputs_skipped"]
        return log
