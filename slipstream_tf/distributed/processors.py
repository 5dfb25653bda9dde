"""Which processors a rank's threads run on, and which of them give way to others.

In: a machine's processors and the ranks on it. Out: this process's affinity and policies; Linux
only, elsewhere nothing changes.

Two things about Gloo cost more than what it sends. Its thread, woken while another of the process
holds a connection's lock, tries for it again and again; where it has taken the other's processor,
it does so until the next tick of the clock, 4 ms later. And threads of two ranks that share two
processors take each other's place all the time. So threads of Horovod do not interrupt others when
they wake (SCHED_BATCH), and each rank keeps to its own processors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

_TASKS = "/proc/self/task"
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology"


def by_place(processors: Iterable[int], topology: str = _TOPOLOGY) -> list[int]:
    """Returns processors in an order in which those of a socket, and of a core, are neighbours.

    Args:
        processors: of the machine.
        topology: path of the folder that tells where a processor is, with "{}" for its number.
    """

    def place(processor: int) -> tuple[int, int, int]:
        told = []
        for name in ("physical_package_id", "core_id"):
            try:
                with open(os.path.join(topology.format(processor), name), encoding="ascii") as file:
                    told.append(int(file.read()))
            except (OSError, ValueError):
                return (0, processor, processor)
        return (told[0], told[1], processor)

    return sorted(processors, key=place)


def share_of(ordered: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """Returns the processors that a rank of a machine keeps to.

    Args:
        ordered: processors of the machine, from `by_place`.
        rank: of the machine's ranks, from 0.
        ranks: on the machine; all processors, where there are more ranks than these.
    """
    if ranks > len(ordered):
        return ordered
    return ordered[rank * len(ordered) // ranks : (rank + 1) * len(ordered) // ranks]


def keep_to_share(rank: int, ranks: int) -> Sequence[int] | None:
    """Keeps all threads of this process, and those to come, to its rank's processors.

    Not where somebody has chosen for it: a launcher that binds processes, `taskset`, or
    HOROVOD_THREAD_AFFINITY in the environment.

    Args:
        rank: of the machine's ranks, from 0.
        ranks: on the machine.

    Returns:
        The processors; None: nothing has changed.
    """
    if ranks == 1 or not os.path.isdir(_TASKS) or "HOROVOD_THREAD_AFFINITY" in os.environ:
        return None
    processors = os.sched_getaffinity(0)
    own = share_of(by_place(processors), rank, ranks)
    if len(processors) < (os.cpu_count() or 1) or len(own) == len(processors):
        return None
    for thread in threads():
        # One that has just ended.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, own)
    return own


def threads() -> set[int]:
    """Returns the numbers of this process's threads; none where Linux is not."""
    if not os.path.isdir(_TASKS):
        return set()
    return {int(name) for name in os.listdir(_TASKS)}


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Has threads that begin within it interrupt none of the others when they wake."""
    before = threads()
    yield
    for thread in threads() - before:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
