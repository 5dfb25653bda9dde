"""distributed.settings: every rank learns which rank's settings differ, and in what."""

from __future__ import annotations

import pytest

from slipstream_tf._utils.agreement import require_same
from slipstream_tf.distributed import SingleProcess


def errors(run_as_ranks, *settings):
    return run_as_ranks(
        len(settings), lambda comm: require_same(comm, settings[comm.rank], "test", "a job")
    )


def test_one_process_agrees_with_itself():
    require_same(SingleProcess(), {"a": object()}, "test", "a job")


def test_the_same_settings_pass_tuples_as_lists(run_as_ranks):
    one, other = {"a": 1, "b": (2, "ä")}, {"b": [2, "ä"], "a": 1}
    assert errors(run_as_ranks, one, other, one) == [None, None, None]


@pytest.mark.parametrize(
    "one, other, message",
    [
        ({"a": 1}, {"a": 2}, "rank 2: a is 2, but on rank 0 1"),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 30}]}, r"a\[1\]\.b is 30, .* 0 2"),
        ({"a": [1]}, {"a": [1, 2]}, r"a is \[1, 2\], but on rank 0 \[1\]"),
        ({"a": 1}, {"b": 1}, r"it is \{'b': 1\}, but on rank 0 \{'a': 1\}"),
        ({"a": None}, {"a": "none"}, "a is 'none', but on rank 0 None"),
    ],
)
def test_every_rank_is_told_who_differs_and_in_what(run_as_ranks, one, other, message):
    for error in errors(run_as_ranks, one, one, other):
        with pytest.raises(ValueError, match=f"Invalid settings of a job on .*{message}"):
            raise error
