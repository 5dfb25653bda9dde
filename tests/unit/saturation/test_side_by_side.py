"""Work on tables by several threads gives what one thread gives."""

from __future__ import annotations

import threading

import pytest

from slipstream_tf.saturation.side_by_side import map_tables, useful_threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_in_order(threads):
    tables = list(range(20))
    found = map_tables(lambda a, b: a - b, tables, [10] * 20, threads=threads)
    assert found == [table - 10 for table in tables]
    assert map_tables(lambda a: a, [], threads=threads) == []


def test_threads_work_at_the_same_time_but_no_more_than_are_allowed():
    barrier, names = threading.Barrier(2, timeout=30), set()

    def meet(_table):
        names.add(threading.current_thread().name)
        return barrier.wait()

    assert sorted(map_tables(meet, [0, 1, 2, 3], threads=2)) == [0, 0, 1, 1]
    assert len(names) == 2


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_tables_error_is_raised(threads):
    def fail(table):
        if table % 2:
            raise ValueError(f"table {table}")

    with pytest.raises(ValueError, match="table 1"):
        map_tables(fail, range(8), threads=threads)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        map_tables(lambda a, b: a, [1, 2], [1], threads=2)


def test_there_is_a_thread_to_work():
    assert useful_threads() >= 1
