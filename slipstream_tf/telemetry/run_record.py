"""The record of a run, `metrics.json`: what ran, on what, how good it was and what it cost.

In: plain values. Out: one JSON file, whole or not there at all.
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
    """Adds up the seconds of a run by phase.

    reading: opening the data, up to the first batch. training: the steps; reading goes on beside
    them and is in here. window_ends: drift, threshold, hot set. evaluation: the test part, reading
    included. Phases do not overlap: time spent in an inner phase is not counted for the outer one.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._began = time.perf_counter()  # What a part of the run before this one took is earlier.
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
        """Seconds since the clock was made, with those of the parts of the run before."""
        return time.perf_counter() - self._began

    def state(self) -> dict[str, Any]:
        """Returns the seconds so far, of a phase that goes on as well, JSON-serialisable."""
        seconds = dict(self.seconds)
        if self._phase:
            seconds[self._phase] += time.perf_counter() - self._phase_began
        return {"seconds": seconds, "wall_seconds": self.wall_seconds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Adds what `state` gave in a part of the run before this one."""
        for name, seconds in state["seconds"].items():
            self.seconds[name] += seconds
        self._began -= state["wall_seconds"]

    def move(self, seconds: float, source: str, target: str) -> None:
        """Counts time measured within the phase `source` for `target` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


def versions() -> dict[str, str]:
    """Versions of this package, Python and the libraries that decide a run's numbers."""
    found = {"slipstream_tf": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine() -> dict[str, Any]:
    """The machine in general words: no name, no path, no address."""
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
    """Writes a JSON file that is whole or not there: written aside, synced, then renamed.

    Args:
        path: of the file; its folder is made if need be.
        record: JSON-serialisable; a float that is not finite becomes null.

    Raises:
        OSError: the folder cannot be made or written.
    """
    whole = Path(path).absolute()
    whole.parent.mkdir(parents=True, exist_ok=True)
    disk.write_text(whole, json.dumps(to_json(record), indent=2, allow_nan=False) + "\n")


def to_json(value: Any) -> Any:
    """Returns a value as JSON gives it back.

    Args:
        value: nested mappings, lists and tuples of what JSON has, and NumPy scalars.

    Returns:
        Dictionaries with text as keys, and lists; a float that is not finite becomes None.
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
