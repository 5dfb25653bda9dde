"""saturation.ranks: what ranks counted is added up, and disagreement is an error on all of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slipstream_tf.distributed import SingleProcess
from slipstream_tf.ops.loss_statistics import LossStatistics, Moments
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.saturation.ranks import DivergenceError, Ranks


@pytest.mark.parametrize("comm", [None, SingleProcess()])
def test_one_process_keeps_what_it_has(comm):
    ranks, values = Ranks(comm), np.arange(3)
    assert ranks.size == 1
    assert ranks.concatenate(values, "a") is values
    np.testing.assert_array_equal(ranks.total(values, "a"), values)
    assert ranks.merge_accesses(values, values, "a") == (values, values)
    counts = UpdateCounts(offered=3)
    assert ranks.total_counts([counts], "a") == [counts]
    ranks.require_agreement(1, 0.5, [values])


def test_scores_of_all_ranks_in_their_order(run_as_ranks):
    def program(comm):
        own = np.full(comm.rank, comm.rank, np.float32)
        return Ranks(comm).concatenate(own, "scores").tolist()

    assert run_as_ranks(3, program) == [[1, 2, 2]] * 3


def test_accesses_are_added_by_key_and_sorted_by_count(run_as_ranks):
    keys = [np.array([7, 1, 3]), np.array([3, 9]), np.empty(0, np.int64)]
    counts = [np.array([4.0, 2.0, 1.0]), np.array([3.0, 2.0]), np.empty(0)]

    def program(comm):
        merged = Ranks(comm).merge_accesses(keys[comm.rank], counts[comm.rank], "hot")
        assert merged[0].dtype == np.int64 and merged[1].dtype == np.float32
        return [values.tolist() for values in merged]

    assert run_as_ranks(3, program) == [[[3, 7, 1, 9], [4, 4, 2, 2]]] * 3


def test_counts_are_added_field_by_field(run_as_ranks):
    def program(comm):
        own = [UpdateCounts(offered=5, sent=comm.rank), UpdateCounts(masked=1 << 40)]
        return Ranks(comm).total_counts(own, "rows")

    wanted = [UpdateCounts(offered=15, sent=3), UpdateCounts(masked=3 << 40)]
    assert run_as_ranks(3, program) == [wanted] * 3


def test_pilots_become_the_mean_over_the_ranks_that_learnt_a_bucket(run_as_ranks):
    buckets = [np.array([1, 5]), np.array([5, 8]), np.empty(0, np.int64)]
    numbers = [
        np.array([[1, 2], [3, 4]], "f"),
        np.array([[5, 8], [7, 7]], "f"),
        np.empty((0, 2), "f"),
    ]

    def program(comm):
        base = np.array([0.1 * comm.rank, 10.0])
        own = {"base": base, "buckets": buckets[comm.rank], "numbers": numbers[comm.rank]}
        merged = Ranks(comm).merge_pilots(own)
        assert merged["numbers"].dtype == np.float32
        return {name: np.round(values, 6).tolist() for name, values in merged.items()}

    wanted = {"base": [0.1, 10.0], "buckets": [1, 5, 8], "numbers": [[1, 2], [4, 6], [7, 7]]}
    assert run_as_ranks(3, program) == [wanted] * 3


def losses_of(rank: int) -> LossStatistics:
    random = np.random.default_rng(rank)
    moments = [Moments(int(random.integers(9)), *random.random(3)) for _ in range(3)]
    return LossStatistics(*moments, 3 + rank, random.random((2, 8)), *random.random(3))


def test_loss_statistics_are_added_field_by_field(run_as_ranks):
    parts = [losses_of(rank) for rank in range(2)]
    for got in run_as_ranks(2, lambda comm: Ranks(comm).total_losses(parts[comm.rank])):
        for field in dataclasses.fields(LossStatistics):
            values = [getattr(part, field.name) for part in (*parts, got)]
            if isinstance(values[0], Moments):
                values = [np.array(dataclasses.astuple(moments)) for moments in values]
            np.testing.assert_allclose(values[2], values[0] + values[1], err_msg=field.name)
        assert isinstance(got.skippable.count, int) and isinstance(got.not_finite, int)


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
        # The same keys, but in other tables.
        ([0.1] * 4, [[np.arange(2), np.arange(1)], [np.arange(1), np.arange(2)]] * 2),
    ],
)
def test_every_rank_is_told_which_ones_differ(run_as_ranks, thresholds, keys):
    for error in agree(run_as_ranks, thresholds, keys):
        with pytest.raises(DivergenceError, match=r"Window 4: .* of rank\(s\) 1, 3 differ"):
            raise error
