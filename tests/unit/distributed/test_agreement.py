"""Tests that collectives over Python values detect differences between ranks."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream_tf import Table, optimizers
from slipstream_tf._utils.agreement import require_same, require_same_rows
from slipstream_tf.distributed import SingleProcess
from slipstream_tf.tables import NativeStore


def errors(run_as_ranks, *settings):
    return run_as_ranks(
        len(settings), lambda comm: require_same(comm, settings[comm.rank], "test", "a job")
    )


def test_one_process_agrees_with_itself():
    require_same(SingleProcess(), {"a": object()}, "test", "a job")


def test_equal_settings_pass_with_tuples_as_lists(run_as_ranks):
    one, other = {"a": 1, "b": (2, "ä")}, {"b": [2, "ä"], "a": 1}
    assert errors(run_as_ranks, one, other, one) == [None, None, None]


@pytest.mark.parametrize(
    "one, other, message",
    [
        ({"a": 1}, {"a": 2}, "rank 2: a is 2, but it is 1 on rank 0"),
        (
            {"a": [{"b": 1}, {"b": 2}]},
            {"a": [{"b": 1}, {"b": 30}]},
            r"a\[1\]\.b is 30, but it is 2 on rank 0",
        ),
        ({"a": [1]}, {"a": [1, 2]}, r"a is \[1, 2\], but it is \[1\] on"),
        ({"a": 1}, {"b": 1}, r"the value is \{'b': 1\}, but it is \{'a': 1\} on"),
        ({"a": None}, {"a": "none"}, "a is 'none', but it is None on"),
    ],
)
def test_every_rank_names_differing_ranks_and_settings(run_as_ranks, one, other, message):
    for error in errors(run_as_ranks, one, one, other):
        with pytest.raises(ValueError, match=f"Invalid settings of a job on .*{message}"):
            raise error


DIM = 3


def make(keys, slots=0.5, updates=4):
    """Returns a store with the given keys in its second table."""
    store = NativeStore([Table("a", DIM), Table("b", DIM)], optimizers.Adagrad(0.1))
    keys = np.sort(np.asarray(keys, np.int64))
    contents = store.export_table("b")
    contents.update(
        keys=keys,
        rows=np.outer(keys + 1.0, [1, 2, 3]).astype(np.float32),
        slots=np.full((keys.size, DIM), slots, np.float32),
        counts=np.random.default_rng().random(keys.size).astype(np.float32),
        steps=np.array([updates, 7], np.int64),
    )
    store.import_table("b", contents)
    return store


def change(store, part, place, value):
    contents = store.export_table("b")
    contents[part][place] = value
    store.import_table("b", contents)
    return store


def run(run_as_ranks, size, make_of_rank):
    """Returns the error message of each rank, or "" for no error."""

    def program(comm):
        require_same_rows(make_of_rank(comm.rank), comm)
        return ""

    return [str(result) for result in run_as_ranks(size, program)]


def test_equal_rows_pass(run_as_ranks):
    # Access counts may differ between ranks.
    assert run(run_as_ranks, 3, lambda rank: make([5, 9, -2])) == [""] * 3
    assert run(run_as_ranks, 2, lambda rank: make([])) == [""] * 2


def test_key_on_one_rank_passes_only_with_initial_row(run_as_ranks):
    def with_initial_row(rank):
        store = make([5, 9, 77] if rank else [5, 9])
        if rank:
            contents = store.export_table("b")
            contents["rows"][2] = make([]).gather("b", [77])[0][0]
            store.import_table("b", contents)
        return store

    assert run(run_as_ranks, 2, with_initial_row) == [""] * 2
    errors = run(run_as_ranks, 2, lambda rank: make([5, 77] if rank else [5]))
    assert "on rank 1: the rows of 1 keys differ from rank 0, for example of key 77" in errors[0]


@pytest.mark.parametrize(
    "make_changed, message",
    [
        (
            lambda: change(make([5, 9]), "rows", (1, 2), 0.0),
            "the rows of 1 keys differ from rank 0, for example of key 9",
        ),
        (
            lambda: change(make([5, 9]), "slots", (0, 1), 9.0),
            "the slots of 1 keys differ from rank 0, for example of key 5",
        ),
        (lambda: make([5, 9], updates=6), "it had 6 updates, but 4 on rank 0"),
        (lambda: make([5]), "the rows of 1 keys differ from rank 0, for example of key 9"),
    ],
)
def test_every_rank_names_rank_and_table(run_as_ranks, make_changed, message):
    errors = run(run_as_ranks, 3, lambda rank: make_changed() if rank == 2 else make([5, 9]))
    assert len(set(errors)) == 1
    assert "rows of table 'b' on rank 2" in errors[0] and message in errors[0], errors[0]
    assert "Load the same rows on all ranks" in errors[0]
