"""Tests that `LookAhead` prepares the next batch only within a window."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.eager import cancellation

from slipstream_tf.ops import _loader
from slipstream_tf.sampling.look_ahead import LookAhead

WAIT = 30.0
SOON = 10.0  # Well below WAIT.


class CountingDataset:
    """Data set of numbers that counts its elements.

    With the external state policy IGNORE, its iterators can be saved.
    """

    def __init__(self, count: int) -> None:
        self.made = tf.Variable(0, dtype=tf.int64, trainable=False)
        options = tf.data.Options()
        policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        options.experimental_external_state_policy = policy
        self.dataset = tf.data.Dataset.range(count).map(self._note).with_options(options)

    def _note(self, number: tf.Tensor) -> Any:
        with tf.control_dependencies([self.made.assign_add(1)]):
            bag = tf.RaggedTensor.from_row_lengths(tf.range(number), [number])
            return {"bag": bag, "number": number, "text": tf.strings.as_string(number)}


def numbers_of(elements: Any) -> list[int]:
    return [int(element["number"]) for element in elements]


def test_elements_order_and_spec_are_preserved():
    noted = CountingDataset(5)
    ahead = LookAhead().read(noted.dataset)
    assert ahead.element_spec == noted.dataset.element_spec
    assert int(ahead.cardinality()) == 5
    for _ in range(2):
        elements = list(ahead)
        assert numbers_of(elements) == [0, 1, 2, 3, 4]
        assert [e["text"].numpy() for e in elements] == [b"0", b"1", b"2", b"3", b"4"]
        assert elements[3]["bag"].to_list() == [[0, 1, 2]]
    assert noted.made.numpy() == 10
    assert list(LookAhead().read(tf.data.Dataset.range(0))) == []


@settings(max_examples=25)
@given(count=st.integers(0, 12), window=st.integers(0, 5), pulled=st.integers(0, 3))
def test_no_element_is_produced_before_preceding_window_ends(count, window, pulled):
    noted, ahead = CountingDataset(count), LookAhead()
    ahead.begin_window(window, pulled)
    in_window = pulled
    for number, _ in enumerate(ahead.read(noted.dataset), 1):
        ahead.wait_until_idle()
        in_window += 1
        is_last = 0 < window <= in_window
        assert noted.made.numpy() == min(number if is_last else number + 1, count)
        if is_last:
            ahead.begin_window(window)
            in_window = 0


def test_next_element_is_produced_on_other_thread():
    threads: list[int] = []
    second = threading.Event()

    def note(number):
        threads.append(threading.get_ident())
        if number == 1:
            second.set()
        return number

    dataset = tf.data.Dataset.range(3)
    dataset = dataset.map(lambda n: tf.numpy_function(note, [n], tf.int64, stateful=True))
    elements = iter(LookAhead().read(dataset))
    next(elements)
    assert second.wait(WAIT), "made without being pulled"
    assert threads[1] != threading.get_ident()
    assert [int(e) for e in elements] == [1, 2]


@pytest.mark.parametrize("settles", [False, True])
def test_checkpoint_contains_produced_element(settles, tmp_path):
    noted, ahead = CountingDataset(8), LookAhead()
    elements = iter(ahead.read(noted.dataset))
    for _ in range(3):
        next(elements)
    if settles:
        ahead.wait_until_idle()
    path = tf.train.Checkpoint(elements=elements).save(str(tmp_path / "saved"))
    assert noted.made.numpy() == 4
    assert numbers_of(elements) == [3, 4, 5, 6, 7]
    again = iter(ahead.read(noted.dataset))
    next(again)
    ahead.wait_until_idle()
    noted.made.assign(4)
    tf.train.Checkpoint(elements=again).restore(path).assert_consumed()
    restored = list(again)
    assert numbers_of(restored) == [3, 4, 5, 6, 7]
    assert restored[0]["bag"].to_list() == [[0, 1, 2]]
    assert noted.made.numpy() == 8, "what was saved is not made again"


def test_checkpoint_at_end_and_before_start_restores(tmp_path):
    noted = CountingDataset(2)
    dataset = LookAhead().read(noted.dataset)
    elements = iter(dataset)
    start = tf.train.Checkpoint(elements=elements).save(str(tmp_path / "start"))
    next(elements), next(elements)
    end = tf.train.Checkpoint(elements=elements).save(str(tmp_path / "end"))
    for path, left in ((start, [0, 1]), (end, [])):
        again = iter(dataset)
        tf.train.Checkpoint(elements=again).restore(path)
        assert numbers_of(again) == left


def test_error_is_raised_at_its_element():
    ahead = LookAhead()
    dataset = tf.data.Dataset.range(4).map(
        lambda n: tf.debugging.check_numerics(1 / (2 - tf.cast(n, tf.float64)), "no number")
    )
    elements = iter(ahead.read(dataset))
    assert [float(next(elements)) for _ in range(2)] == [0.5, 1.0]
    ahead.wait_until_idle()
    with pytest.raises(tf.errors.InvalidArgumentError, match="no number"):
        next(elements)
    assert float(next(elements)) == -1.0


def test_deleted_iterator_finishes_element_in_progress():
    begun = []

    def make(number):
        begun.append(int(number))
        time.sleep(0.05)
        return number

    ahead = LookAhead()
    dataset = tf.data.Dataset.range(5)
    dataset = dataset.map(lambda n: tf.numpy_function(make, [n], tf.int64))
    for _ in range(5):
        next(iter(ahead.read(dataset)))
    ahead.wait_until_idle()
    made = len(begun)
    time.sleep(0.2)
    assert set(begun) <= {0, 1}
    assert len(begun) == made


class StallingReader:
    """Reader that waits for `goes_on` before it makes its second element."""

    def __init__(self, ahead: LookAhead) -> None:
        self.is_making, self.goes_on = threading.Event(), threading.Event()
        dataset = tf.data.Dataset.range(3)
        dataset = dataset.map(lambda n: tf.numpy_function(self._make, [n], tf.int64))
        self.elements: Any = iter(ahead.read(dataset))
        next(self.elements)
        assert self.is_making.wait(WAIT)

    def _make(self, number: int) -> int:
        if number == 1:
            self.is_making.set()
            self.goes_on.wait(WAIT)
        return number


def test_settle_ends_when_step_is_cancelled():
    ahead = LookAhead()
    stalled = StallingReader(ahead)
    manager = cancellation.CancellationManager()
    wait_until_idle = manager.get_cancelable_function(
        tf.function(ahead.wait_until_idle).get_concrete_function()
    )
    with futures.ThreadPoolExecutor() as pool:
        settling = pool.submit(wait_until_idle)
        try:
            with pytest.raises(futures.TimeoutError):
                settling.result(0.1)
            manager.start_cancel()
            with pytest.raises(tf.errors.CancelledError, match="waited for the input pipeline"):
                settling.result(SOON)
        finally:
            stalled.goes_on.set()
    assert int(next(stalled.elements)) == 1, "the reader goes on"
    ahead.wait_until_idle()


def test_settle_ends_when_awaited_reader_ends():
    ahead = LookAhead()
    stalled = StallingReader(ahead)
    with futures.ThreadPoolExecutor() as pool:
        settling = pool.submit(ahead.wait_until_idle)
        try:
            with pytest.raises(futures.TimeoutError):
                settling.result(0.1)
            pool.submit(delattr, stalled, "elements")
            settling.result(SOON)
        finally:
            stalled.goes_on.set()


def test_multiple_iterators_share_look_ahead():
    ahead = LookAhead()
    one, other = CountingDataset(4), CountingDataset(4)
    both = [iter(ahead.read(noted.dataset)) for noted in (one, other)]
    next(both[0]), next(both[1])
    ahead.wait_until_idle()
    assert (one.made.numpy(), other.made.numpy()) == (2, 2)


def test_invalid_arguments_raise():
    ahead = LookAhead()
    with pytest.raises(ValueError, match=r"Invalid `batches`: -1 for LookAhead\.begin_window"):
        ahead.begin_window(-1)
    with pytest.raises(ValueError, match="Invalid `pulled`: -2"):
        ahead.begin_window(3, -2)
    library = _loader.library()
    handle = library.slipstream_look_ahead()
    counts = {"batches": np.int64(-1), "pulled": np.int64(0)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="batches is -1; expected at least 0"):
        library.slipstream_look_ahead_begin_window(handle=handle, **counts)
    with pytest.raises(tf.errors.InvalidArgumentError, match="output_types are"):
        library.slipstream_ahead_dataset(
            input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.range(3)),
            handle=handle,
            output_types=[tf.float32],
            output_shapes=[[]],
        )
