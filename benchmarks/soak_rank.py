"""A rank of `soak.py`: slipstream-train with limited speed and step logs.

    soak_rank.py NOTES STEP_SECONDS FLAGS...

NOTES is a folder for `rank-R-PID.jsonl`: a line that describes the process, then a line per step.
STEP_SECONDS is the minimum time of a step. The process sleeps for the rest of that time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

from slipstream_tf._utils import agent
from slipstream_tf.cli import train


class Notes(keras.callbacks.Callback):
    """Logs loss and AUC after each step, then sleeps.

    Args:
        folder: The folder for the file of this process.
        step_seconds: The minimum time of a step.
    """

    def __init__(self, folder: Path, step_seconds: float) -> None:
        super().__init__()
        rank = agent.rank() or 0
        self._path = folder / f"rank-{rank}-{os.getpid()}.jsonl"
        self._step_seconds = step_seconds
        self._begun = time.monotonic()
        self._write({"rank": rank, "pid": os.getpid(), "time": time.time()})

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the start time of the step."""
        del batch, logs
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the step; its number continues over all parts of the run."""
        values = {name: float((logs or {})[name]) for name in ("loss", "auc", "trained")}
        self._write({"step": batch + 1, "time": time.time(), **values})
        time.sleep(max(0.0, self._step_seconds - (time.monotonic() - self._begun)))

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    notes = Notes(Path(sys.argv.pop(1)), float(sys.argv.pop(1)))
    train.entry_point(callbacks=(notes,))
