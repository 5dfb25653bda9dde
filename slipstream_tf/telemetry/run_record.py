"""The record of a run, `metrics.json`: settings, machine, quality and cost.

The file is written atomically: it is complete or absent.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream_tf._utils import disk
from slipstream_tf._version import __version__

RECORD = "metrics.json"
SCHEMA = 1
PHASES = ("reading", "training", "window_ends", "evaluation")
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "pyarrow")


class PhaseClock:
    """Measures the seconds of each phase of a run.

    - reading: opening the data, until the first batch.
    - training: the steps. Includes the reading of further batches, which runs in parallel.
    - window_ends: drift, threshold and hot set.
    - evaluation: the test data, including its reading.

    Phases do not overlap: use `move` to subtract the time of an inner phase from the outer phase.

    Attributes:
        seconds: Seconds of each phase so far, by name.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        # `restore` moves this back by the time of earlier parts of the run.
        self._began = time.perf_counter()
        self._phase, self._phase_began = "", 0.0

    @contextmanager
    def phase(self, name: str) -> Any:
        """Adds the time of the `with` block to a phase."""
        self._phase, self._phase_began = name, time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - self._phase_began
            self._phase = ""

    @property
    def wall_seconds(self) -> float:
        """Seconds since the clock was created, plus restored earlier parts."""
        return time.perf_counter() - self._began

    def state(self) -> dict[str, Any]:
        """Returns the seconds so far, JSON-serializable.

        Includes the phase that is running.
        """
        seconds = dict(self.seconds)
        if self._phase:
            seconds[self._phase] += time.perf_counter() - self._phase_began
        return {"seconds": seconds, "wall_seconds": self.wall_seconds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Adds the seconds that `state` returned earlier in the run."""
        for name, seconds in state["seconds"].items():
            self.seconds[name] += seconds
        self._began -= state["wall_seconds"]

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves measured seconds from phase `source` to phase `target`."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


def versions() -> dict[str, str]:
    """Returns the versions of this package, Python and important libraries."""
    found = {"slipstream_tf": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine() -> dict[str, Any]:
    """Returns a description of the machine without name, path or address."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processors = ""
    with suppress(OSError):
        processors = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*: (.*)$", processors, re.MULTILINE)
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": model[1].strip() if model else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
    }


def write_json(path: str, record: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically: it is complete or absent.

    Args:
        path: Path of the file. Missing folders are created.
        record: JSON-serializable. Floats that are not finite become null.

    Raises:
        OSError: The folder cannot be created or written.
    """
    whole = Path(path).absolute()
    whole.parent.mkdir(parents=True, exist_ok=True)
    disk.write_text(whole, json.dumps(to_json(record), indent=2, allow_nan=False) + "\n")


def to_json(value: Any) -> Any:
    """Converts a value to types that JSON preserves.

    Args:
        value: Nested mappings, lists and tuples of JSON types and NumPy scalars.

    Returns:
        Dictionaries with string keys, and lists. Floats that are not finite become None.
    """
    if isinstance(value, Mapping):
        return {str(name): to_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(part) for part in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
