"""engine.ranks.part_of: the state that a rank continues from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream_tf.engine.ranks import part_of


def state(rank: int) -> dict[str, Any]:
    """What rank `rank` knows; its own keys are those that are rank modulo 10."""
    own = np.array([rank, rank + 10])
    numbers = np.array([rank + 1, rank, 0, 0, 0, 100 + rank, 50, 3])
    return {
        "loop": {"step": 7},
        "tables": {
            "t": {
                "dim": 2,
                "keys": np.arange(20),
                "counts": {"offered": 10 + rank, "sent": rank},
                "snapshot_keys": own,
                "snapshot": np.stack([own, own], 1).astype(np.float32),
                "unmarked": own[:0],
            }
        },
        "window": {
            "sums": np.full(12, float(rank)),
            "histogram": np.full((2, 3), float(rank)),
            "numbers": numbers,
            "tables": np.zeros(4, np.int32),
            "keys": np.arange(4),
            "ends": np.array([1, 2, 4]),
            "losses": np.zeros(3, np.float32),
        },
        "traffic": {"rows": rank},
    }


def test_as_many_ranks_get_their_own_and_all_snapshots() -> None:
    states = [state(rank) for rank in range(3)]
    for rank in range(3):
        part = part_of(states, rank, 3)
        assert part["window"] is states[rank]["window"]
        assert part["tables"]["t"]["counts"] == {"offered": 10 + rank, "sent": rank}
        snapshot = part["tables"]["t"]
        np.testing.assert_array_equal(snapshot["snapshot_keys"], [0, 1, 2, 10, 11, 12])
        np.testing.assert_array_equal(snapshot["snapshot"][:, 1], [0, 1, 2, 10, 11, 12])


@pytest.mark.parametrize("before, now", [(3, 1), (3, 2), (2, 3), (1, 4)])
def test_counts_go_to_one_rank_each(before: int, now: int) -> None:
    states = [state(rank) for rank in range(before)]
    parts = [part_of(states, rank, now) for rank in range(now)]
    for name in ("offered", "sent"):
        wanted = sum(s["tables"]["t"]["counts"][name] for s in states)
        assert sum(part["tables"]["t"]["counts"][name] for part in parts) == wanted
    assert sum(part["window"]["sums"][0] for part in parts) == sum(range(before))
    assert sum(int(part["window"]["numbers"][0]) for part in parts) == sum(range(1, before + 1))
    for part in parts:
        window = part["window"]
        # The sample is drawn anew; random choices go on.
        assert all(len(window[name]) == 0 for name in ("tables", "keys", "ends", "losses"))
        assert window["numbers"][7] == 0 and window["numbers"][5] >= 100
        assert part["traffic"] == {}
    # What came in is as it was.
    assert states[0]["window"]["numbers"][7] == 3
