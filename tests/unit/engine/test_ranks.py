"""Tests of `engine.ranks`: totals, disagreement errors, and restores at other world sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from slipstream_tf.distributed import SingleProcess
from slipstream_tf.engine.ranks import DivergenceError, Ranks, part_of
from slipstream_tf.ops.loss_statistics import LossStatistics
from slipstream_tf.ops.update_policy import UpdateCounts


@pytest.mark.parametrize("comm", [None, SingleProcess()])
def test_single_process_returns_its_values(comm):
    ranks, values = Ranks(comm), np.arange(3)
    assert ranks.size == 1
    assert ranks.concatenate(values, "a") is values
    np.testing.assert_array_equal(ranks.total(values, "a"), values)
    assert ranks.merge_accesses(values, values, "a") == (values, values)
    counts = UpdateCounts(offered=3)
    assert ranks.total_counts([counts], "a") == [counts]
    ranks.require_agreement(1, 0.5, [values])


def test_scores_are_concatenated_in_rank_order(run_as_ranks):
    def program(comm):
        own = np.full(comm.rank, comm.rank, np.float32)
        return Ranks(comm).concatenate(own, "scores").tolist()

    assert run_as_ranks(3, program) == [[1, 2, 2]] * 3


def test_accesses_are_summed_by_key_and_sorted_by_count(run_as_ranks):
    keys = [np.array([7, 1, 3]), np.array([3, 9]), np.empty(0, np.int64)]
    counts = [np.array([4.0, 2.0, 1.0]), np.array([3.0, 2.0]), np.empty(0)]

    def program(comm):
        merged = Ranks(comm).merge_accesses(keys[comm.rank], counts[comm.rank], "hot")
        assert merged[0].dtype == np.int64 and merged[1].dtype == np.float32
        return [values.tolist() for values in merged]

    assert run_as_ranks(3, program) == [[[3, 7, 1, 9], [4, 4, 2, 2]]] * 3


def test_counts_are_summed_per_field(run_as_ranks):
    def program(comm):
        own = [UpdateCounts(offered=5, sent=comm.rank), UpdateCounts(masked=1 << 40)]
        return Ranks(comm).total_counts(own, "rows")

    wanted = [UpdateCounts(offered=15, sent=3), UpdateCounts(masked=3 << 40)]
    assert run_as_ranks(3, program) == [wanted] * 3


def test_pilots_are_merged_by_updates_of_each_rank(run_as_ranks):
    # The weight and the accumulator of one bucket of a linear pilot.
    def entry(number, accumulator):
        return [number, accumulator, 0.0, 0.0]

    buckets = [np.array([1, 5]), np.array([5, 8]), np.empty(0, np.int64)]
    first = [[entry(1, 2), entry(3, 1)], [entry(6, 2), entry(7, 7)], np.empty((0, 4))]
    # After the first merge, only rank 1 trains bucket 5.
    all_buckets = np.array([1, 5, 8])
    then = [[entry(1, 2), entry(5 + r % 2, 5 / 3 + r % 2), entry(7, 7)] for r in range(3)]

    def program(comm):
        ranks, r = Ranks(comm), comm.rank
        merged = []
        for own, numbers in ((buckets[r], first[r]), (all_buckets, then[r])):
            base = np.array([0.1 * (r + 1), 10.0 * (r > 0)])
            pilot = {"base": base, "buckets": own, "numbers": np.array(numbers, "f")}
            found = ranks.merge_pilots(pilot)
            assert found["numbers"].dtype == np.float32
            merged.append({name: np.round(v.astype("d"), 4).tolist() for name, v in found.items()})
        return merged

    wanted = [
        # The base rate ignores ranks without examples.
        {"base": [0.25, 10.0], "buckets": [1, 5, 8]},
        {"base": [0.25, 10.0], "buckets": [1, 5, 8]},
    ]
    wanted[0]["numbers"] = [entry(1, 2), entry(5, 1.6667), entry(7, 7)]
    wanted[1]["numbers"] = [entry(1, 2), entry(6, 2.6667), entry(7, 7)]
    assert run_as_ranks(3, program) == [wanted] * 3


def losses_of(rank: int) -> LossStatistics:
    random = np.random.default_rng(rank)
    sums = random.random(4)
    return LossStatistics(int(random.integers(9)), *sums, 3 + rank, random.random((2, 8)))


def test_loss_statistics_are_summed_per_field(run_as_ranks):
    parts = [losses_of(rank) for rank in range(2)]
    for got in run_as_ranks(2, lambda comm: Ranks(comm).total_losses(parts[comm.rank])):
        for field in dataclasses.fields(LossStatistics):
            values = [getattr(part, field.name) for part in (*parts, got)]
            np.testing.assert_allclose(values[2], values[0] + values[1], err_msg=field.name)
        assert isinstance(got.skippable, int) and isinstance(got.not_finite, int)


def agree(run_as_ranks, thresholds, keys):
    return run_as_ranks(
        len(thresholds),
        lambda comm: Ranks(comm).require_agreement(4, thresholds[comm.rank], keys[comm.rank]),
    )


def test_equal_keys_and_thresholds_pass(run_as_ranks):
    keys = [[np.array([1, 2]), np.empty(0, np.int64)]] * 2
    assert agree(run_as_ranks, [0.1, 0.1], keys) == [None, None]


@pytest.mark.parametrize(
    "thresholds, keys",
    [
        ([0.1, 0.2, 0.1, 0.3], [[np.array([1])]] * 4),
        ([0.1] * 4, [[np.array([1])], [np.array([2])], [np.array([1])], [np.empty(0, np.int64)]]),
        # The same keys, but in different tables.
        ([0.1] * 4, [[np.arange(2), np.arange(1)], [np.arange(1), np.arange(2)]] * 2),
    ],
)
def test_every_rank_names_differing_ranks(run_as_ranks, thresholds, keys):
    for error in agree(run_as_ranks, thresholds, keys):
        with pytest.raises(DivergenceError, match=r"Window 4: .* differ .* ranks \[1, 3\]"):
            raise error


def state(rank: int) -> dict[str, Any]:
    """Returns a rank's state with snapshots of two keys."""
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


def test_same_number_of_ranks_restores_own_state_and_all_snapshots() -> None:
    states = [state(rank) for rank in range(3)]
    for rank in range(3):
        part = part_of(states, rank, 3)
        assert part["window"] is states[rank]["window"]
        assert part["tables"]["t"]["counts"] == {"offered": 10 + rank, "sent": rank}
        snapshot = part["tables"]["t"]
        np.testing.assert_array_equal(snapshot["snapshot_keys"], [0, 1, 2, 10, 11, 12])
        np.testing.assert_array_equal(snapshot["snapshot"][:, 1], [0, 1, 2, 10, 11, 12])


@pytest.mark.parametrize("before, now", [(3, 1), (3, 2), (2, 3), (1, 4)])
def test_counts_are_assigned_to_one_rank(before: int, now: int) -> None:
    states = [state(rank) for rank in range(before)]
    parts = [part_of(states, rank, now) for rank in range(now)]
    for name in ("offered", "sent"):
        wanted = sum(s["tables"]["t"]["counts"][name] for s in states)
        assert sum(part["tables"]["t"]["counts"][name] for part in parts) == wanted
    assert sum(part["window"]["sums"][0] for part in parts) == sum(range(before))
    assert sum(int(part["window"]["numbers"][0]) for part in parts) == sum(range(1, before + 1))
    for part in parts:
        window = part["window"]
        # The sample starts empty, but the random number generator continues.
        assert all(len(window[name]) == 0 for name in ("tables", "keys", "ends", "losses"))
        assert window["numbers"][7] == 0 and window["numbers"][5] >= 100
        assert part["traffic"] == {}
    # The input states are not modified.
    assert states[0]["window"]["numbers"][7] == 3
