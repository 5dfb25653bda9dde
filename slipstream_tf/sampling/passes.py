"""Passes over the training data in `fit`: their length, and the steps of the whole training.

In: the data set that `Slipstream.apply` makes, its largest number of batches, and the epochs of a
`fit`. Out: the data set for `model.fit`; warnings of Keras that are true; the tracker's plan.

Keras limits every epoch to the number of batches that the data set reports. If the data set reports
none, Keras counts the batches of the first epoch and limits later epochs to this count.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from slipstream_tf import _compat
from slipstream_tf._utils.agreement import most_known
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.engine.tracker import SaturationTracker

_RAN_OUT = "Your input ran out of data"


class Applied(tf.data.Dataset):
    """What `Slipstream.apply` returns: its `cardinality` is that without skipping, or the most.

    So Keras lets each epoch go on to its end, whatever is skipped. A pass that skips has fewer
    batches.

    Args:
        dataset: of any elements.
        most: batches of a pass at most; None: what `dataset` says.
        begins: called when an iteration begins.
        reweigh: called with class weights, returns the data set that has them; None: they are in.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        most: int | None,
        begins: Callable[[], None],
        reweigh: Callable[[Any], tf.data.Dataset] | None = None,
    ) -> None:
        self._dataset, self._most, self._begins = dataset, most, begins
        self.reweigh = reweigh
        super().__init__(dataset._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """Specs of an element."""
        return self._dataset.element_spec

    def __iter__(self) -> Any:
        """Begins a pass."""
        self._begins()
        return super().__iter__()

    def map(self, map_func: Any, *args: Any, **kwargs: Any) -> tf.data.Dataset:
        """Maps the elements, but not by the class weights of a plain model's `fit`.

        Raises:
            ValueError: it is Keras that maps them, by its `class_weight`.
        """
        if _compat.weighs_classes(map_func):
            allowed = (
                "None, with slipstream.apply(data, class_weight=...) instead, or a "
                "slip.keras.Model: Keras takes none beside the weights of SkipExamples(keep=), and "
                "fetches batches ahead of the windows"
            )
            raise invalid("class_weight", "weights by class", "fit with Slipstream", allowed)
        return super().map(map_func, *args, **kwargs)

    def cardinality(self) -> tf.Tensor:
        """Returns the most batches that a pass may have, int64 []; below 0: not known."""
        if self._most is None:
            return super().cardinality()
        return tf.constant(self._most, tf.int64)


class EpochWatch:
    """Watches the epochs of a `fit`: which of Keras's warnings are false, and which is missing.

    Where examples are skipped, an epoch ends before the number of batches that Keras expects; it
    takes that for an accident. Where the data's length is not known, later epochs with more
    batches than the first are cut off; Keras says nothing.
    """

    def __init__(self) -> None:
        """Starts outside of any `fit`."""
        self._first: int | None = None
        self._calls = 0
        self._end: weakref.finalize[Any, EpochWatch] | None = None

    def begin_fit(self, steps_are_given: bool) -> None:
        """A `fit` begins.

        Args:
            steps_are_given: whether the user has said how many steps an epoch has.
        """
        self.end_fit()
        self._first = None
        if not steps_are_given:
            warnings.filterwarnings("ignore", _RAN_OUT, UserWarning)
            # A `fit` that breaks off does not say so: the filter goes with this object at the last.
            self._end = weakref.finalize(self, _remove_filter, warnings.filters[0])

    def end_fit(self) -> None:
        """The `fit` has ended, or another begins."""
        if self._end is not None:
            self._end()
        self._end = None

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._calls = 0

    def count(self) -> None:
        """One call of the train function has ended."""
        self._calls += 1

    def end_epoch(self, epoch: int, is_length_known: bool) -> None:
        """An epoch has ended; warns if it was cut off.

        Args:
            epoch: its number, from 0.
            is_length_known: whether Keras knew how many batches there are.
        """
        if self._first is None:
            self._first = self._calls
        elif not is_length_known and self._calls > self._first:
            # Keras counts the call that found the data's end, too.
            logging.warning(
                "Epoch %d was ended by Keras after %d batches, because the first one had %d: what "
                "was left of the data was not trained. Let Keras know its length: put "
                ".apply(tf.data.experimental.assert_cardinality(batches)) before Slipstream.apply.",
                epoch + 1,
                self._calls,
                self._first,
            )


def _remove_filter(item: Any) -> None:
    if item in warnings.filters:
        warnings.filters.remove(item)  # type: ignore[attr-defined]


class StepPlan:
    """Adds up the steps that training would take without skipping.

    Attributes:
        batches: of a pass over the data, or None if that is not known.
        steps: planned in all, from the start.
    """

    def __init__(
        self, tracker: SaturationTracker, comm: Communicator, changed: Callable[[], None]
    ) -> None:
        """Starts without a plan.

        Args:
            tracker: told of it.
            comm: the ranks.
            changed: called when the plan has changed, and with it maybe a window's length.
        """
        self._tracker, self._comm, self._changed = tracker, comm, changed
        self.batches: int | None = None
        self.steps = 0
        self._of_epoch = 0
        self._next_fit_is_planned = self._was_exceeded = False

    def add_epochs(self, epochs: int, steps: int | None = None) -> bool:
        """Plans more training; with several ranks a collective.

        Args:
            epochs: beside those planned before.
            steps: of an epoch; None: `batches`.

        Returns:
            Whether the steps are known, or were planned before.
        """
        self._of_epoch = 0
        if self._next_fit_is_planned:
            # The `fit` that goes on is the one that was planned.
            self._next_fit_is_planned = False
            return True
        if steps is None:
            steps = self.batches
        steps = most_known(self._comm, steps, "slipstream.planned")
        if steps is None:
            return False
        self._of_epoch = steps
        self._set(self.steps + epochs * steps)
        return True

    def is_exceeded_by(self, step: int) -> bool:
        """Whether a step is beyond what this process planned; once."""
        if self._was_exceeded or not self._of_epoch or step <= self.steps:
            return False
        self._was_exceeded = self._tracker.goes_by_plan
        return self._was_exceeded

    def leave_out_epochs(self, epochs: int) -> None:
        """Takes back epochs that the last `add_epochs` planned, of a `fit` that begins later."""
        self._set(self.steps - epochs * self._of_epoch)

    def restore(self, steps: int, is_in_fit: bool = False) -> None:
        """Goes on from a plan that was saved, whose `fit` comes next, or has begun."""
        self.steps, self._of_epoch = steps, 0
        self._next_fit_is_planned = steps > 0 and not is_in_fit

    def _set(self, steps: int) -> None:
        self.steps = steps
        self._tracker.plan(steps)
        self._changed()


def present_window(tracker: SaturationTracker) -> str:
    """Returns a sentence about the present window, or an empty string at its start."""
    length = tracker.window_steps
    steps = length - tracker.steps_left
    if not steps:
        return ""
    now = tracker.classifier.counts()
    return (
        f"The present window goes on: {steps:,} of {length:,} steps, {now.examples_seen:,} "
        f"examples, {now.examples_skipped:,} skipped."
    )
