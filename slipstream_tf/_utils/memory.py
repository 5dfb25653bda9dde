"""Reads the memory limits of the machine and its control groups."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from slipstream_tf._utils.errors import invalid

_NO_LIMIT = 1 << 60  # Version 1 control groups report at least this number if there is no limit.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory limits, in bytes, including swap space.

    Attributes:
        total: Total memory, used and unused.
        available: Unused memory.
        owner: Name of the machine or control group that sets the limit, for errors.
    """

    total: int
    available: int
    owner: str


def read(root: Path = Path("/")) -> Memory | None:
    """Returns the tightest limit of the machine and this process's control groups.

    Args:
        root: Directory that contains `proc` and `sys`.

    Returns:
        The limit, or None if the kernel does not report it (not Linux).
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        swap = kib.get("SwapTotal", 0) << 10
        available = kib.get("MemAvailable", kib["MemFree"]) + kib.get("SwapFree", 0)
        found = Memory((kib["MemTotal"] << 10) + swap, available << 10, "the machine")
    except (OSError, KeyError, ValueError, IndexError):
        return None
    for folder, limit, usage in _groups(root):
        maximum = _number(folder / limit)
        if maximum is None or maximum >= _NO_LIMIT:
            continue
        left = max(maximum - (_number(folder / usage) or 0) + _reclaimable(folder), 0)
        total = min(found.total, maximum + swap)
        owner = f"the control group {folder}" if maximum + swap < found.total else found.owner
        found = Memory(total, min(found.available, left + swap), owner)
    return found


def require_room(argument: str, value: int, nbytes: int, sum_up: str, place: str) -> None:
    """Raises ValueError if a budget exceeds the total memory.

    Logs a warning if it exceeds only the available memory: memory is allocated as it is used,
    so a budget that is never reached is harmless.

    Args:
        argument: Name of the budget in the public API.
        value: Value of the budget.
        nbytes: Memory of a fully used budget, in bytes.
        sum_up: Derivation of `nbytes`, for example "1000 rows x (64 values + 20 index) bytes".
        place: Where the budget is used, for example "table 'user'".

    Raises:
        ValueError: The budget exceeds the total memory.
    """
    memory = read()
    if memory is None or nbytes <= memory.available:
        return
    required = f"the required memory ({sum_up}) is {gib(nbytes)}"
    if nbytes > memory.total:
        maximum = max(int(value * (memory.total / nbytes)), 0)
        allowed = f"at most {maximum}, because {required}, and {memory.owner} has "
        raise invalid(argument, value, place, allowed + gib(memory.total))
    logging.warning(
        "`%s` of %s may exceed the memory: %s, and %s has %s available now. Reduce the value "
        "or free memory if training needs this memory.",
        *(argument, place, required, memory.owner, gib(memory.available)),
    )


def gib(nbytes: int) -> str:
    """Formats a number of bytes, for example "1.5 GiB"."""
    unit, power = ("GiB", 30) if nbytes >= 1 << 27 else ("MiB", 20)
    return f"{nbytes / (1 << power):,.1f} {unit}"


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields folder, limit file and usage file of this process's control groups."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A parent's limit applies to its children. In a container only the mount point may exist.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth]), limit, usage


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # "max", or the file does not exist


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file, or an empty list without one."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _reclaimable(folder: Path) -> int:
    """Returns the bytes of cached files that the kernel frees on demand."""
    found = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))
