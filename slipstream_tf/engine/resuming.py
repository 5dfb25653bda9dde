"""What a rank goes on from: the engine's states of all ranks, at any other number of ranks. Pure.

In: what `SaturationTracker.state` gave on each rank. Out: one such state for a rank of a job. What
all ranks decide alike (states of keys, T, reports, steering) is the same in all of them; a rank's
own are the snapshots of its own rows, and the counts and the sample of its inputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_tf._utils.errors import invalid
from slipstream_tf.engine.tracked_table import TrackedTable

# In the "numbers" of a window, see the op SlipstreamClassifierExportWindow.
_COUNTS, _OFFERED_IN_WINDOW = slice(0, 5), 7
_SUMS = 12
_SAMPLE = ("tables", "keys", "ends", "losses")
_SNAPSHOT = ("snapshot_keys", "snapshot")


def require_restorable(
    states: Sequence[Mapping[str, Any]],
    tables: Sequence[TrackedTable],
    metric: str,
) -> None:
    """Raises ValueError unless an engine with these tables and settings can take the states."""
    place = "a saved state of the saturation engine"
    if not states:
        raise invalid("states", [], place, "one per rank that saved it")
    here = {table.name: table.dim for table in tables}
    for state in states:
        saved = {name: table["dim"] for name, table in state["tables"].items()}
        if saved != here:
            raise invalid("tables", saved, place, f"the tracked tables and their dims, {here}")
        if state["metric"] != metric:
            raise invalid("metric", state["metric"], place, f"{metric!r}, as configured")


def part_of(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Returns what a rank goes on from.

    Args:
        states: of every rank that saved, rank 0 first.
        rank: that goes on.
        size: ranks that go on. If as many saved, a rank gets its own back; else each of the ranks
            that saved hands its counts to the rank of its number modulo `size`.

    Returns:
        A state with the snapshots of all ranks.
    """
    if len(states) == size:
        own = dict(states[rank])
    else:
        own = {**states[0], "window": _window(states, rank, size), "traffic": {}}
    assigned = states[rank : rank + 1] if len(states) == size else states[rank::size]
    own["tables"] = {
        name: {
            **table,
            **_snapshots([state["tables"][name] for state in states]),
            "counts": {
                kind: sum(state["tables"][name]["counts"][kind] for state in assigned)
                for kind in table["counts"]
            },
        }
        for name, table in own["tables"].items()
    }
    return own


def _snapshots(tables: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The snapshots of all ranks, each key's once."""
    joined = {name: np.concatenate([table[name] for table in tables]) for name in _SNAPSHOT}
    _, first = np.unique(joined["snapshot_keys"], return_index=True)
    return {name: values[first] for name, values in joined.items()}


def _window(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, np.ndarray]:
    """The window's counts of the ranks that this one goes on for; their samples are left out."""
    window = dict(states[min(rank, len(states) - 1)]["window"])
    assigned = [state["window"] for state in states[rank::size]]
    for name in ("sums", "histogram"):
        window[name] = sum((w[name] for w in assigned), np.zeros_like(window[name]))
    numbers = window["numbers"].copy()
    numbers[_COUNTS] = sum((w["numbers"][_COUNTS] for w in assigned), np.zeros(5, np.int64))
    numbers[_OFFERED_IN_WINDOW] = 0
    window["numbers"] = numbers
    return {**window, **{name: window[name][:0] for name in _SAMPLE}}
