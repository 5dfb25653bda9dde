"""What memory this process can have, as the kernel says: of the machine and of control groups."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from slipstream_tf._utils.errors import invalid

_NO_LIMIT = 1 << 60  # control groups of version 1 have such a number where there is none


@dataclasses.dataclass(frozen=True)
class Memory:
    """What there is, in bytes.

    Attributes:
        total: with what is used already, and swap space.
        available: without.
        owner: whose it is, for errors.
    """

    total: int
    available: int
    owner: str


def read(root: Path = Path("/")) -> Memory | None:
    """Returns the tightest of the machine's memory and the limits of this process's control groups.

    Args:
        root: where `proc` and `sys` are.

    Returns:
        None: the kernel does not say (no Linux).
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
        most = _number(folder / limit)
        if most is None or most >= _NO_LIMIT:
            continue
        left = max(most - (_number(folder / usage) or 0) + _reclaimable(folder), 0)
        total = min(found.total, most + swap)
        owner = f"the control group {folder}" if most + swap < found.total else found.owner
        found = Memory(total, min(found.available, left + swap), owner)
    return found


def require_room(argument: str, value: int, nbytes: int, sum_up: str, place: str) -> None:
    """Refuses a budget that all memory could not hold; warns of one that what is left cannot.

    Memory is taken as it is used, so that a budget that is never reached does no harm.

    Args:
        argument: name of the budget as the user wrote it.
        value: of it.
        nbytes: what it takes when it is used up.
        sum_up: how that comes about, e.g. "1000 rows x (64 values + 20 index) bytes".
        place: where, e.g. "table 'user'".

    Raises:
        ValueError: there can never be so much.
    """
    memory = read()
    if memory is None or nbytes <= memory.available:
        return
    text = f"{sum_up} = {gib(nbytes)}; {memory.owner} has {gib(memory.total)}"
    if nbytes > memory.total:
        most = max(int(value * (memory.total / nbytes)), 0)
        raise invalid(argument, value, place, f"up to {most}: {text}")
    logging.warning(
        "`%s` of %s may not be met: %s, of which %s are left now.",
        *(argument, place, text, gib(memory.available)),
    )


def gib(nbytes: int) -> str:
    """Returns bytes as a person reads them, e.g. "1.5 GiB"."""
    unit, power = ("GiB", 30) if nbytes >= 1 << 27 else ("MiB", 20)
    return f"{nbytes / (1 << power):,.1f} {unit}"


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields the folders of this process's control groups, with their files of limit and usage."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A limit above holds below; within a container only the mount may be there.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth]), limit, usage


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # "max", or not there


def _lines(path: Path) -> list[str]:
    """Lines of a file; none where it is not there."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _reclaimable(folder: Path) -> int:
    """Bytes of files that the kernel keeps as long as nobody needs the memory."""
    found = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))
