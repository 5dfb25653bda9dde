"""Plans the length of passes and of the whole training in `fit`.

Keras limits each epoch to the cardinality of the dataset. If the cardinality is unknown, Keras
counts the batches of the first epoch and limits later epochs to this count. Skipping changes the
number of batches per pass, therefore this module reports an upper bound to Keras, silences false
Keras warnings and adds a missing one.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from slipstream_tf import _compat
from slipstream_tf._utils.agreement import max_known
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.engine.tracker import SaturationTracker

_RAN_OUT = "Your input ran out of data"


class Applied(tf.data.Dataset):
    """Wraps the dataset of `Slipstream.apply` and reports its cardinality without skipping.

    The cardinality is an upper bound, so that Keras runs each epoch to the end of the data. A pass
    with skipping has fewer batches.

    Args:
        dataset: Dataset with elements of any structure.
        maximum: Maximum number of batches in a pass. None uses the cardinality of `dataset`.
        begins: Called when Python begins to iterate over the dataset.
        reweigh: Called with class weights; returns the dataset with these weights. None if class
            weights were already applied.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        maximum: int | None,
        begins: Callable[[], None],
        reweigh: Callable[[Any], tf.data.Dataset] | None = None,
    ) -> None:
        self._dataset, self._maximum, self._begins = dataset, maximum, begins
        self.reweigh = reweigh
        super().__init__(dataset._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """Returns a batch's nested structure of `tf.TypeSpec` (dtypes and shapes)."""
        return self._dataset.element_spec

    def __iter__(self) -> Any:
        """Begins a pass."""
        self._begins()
        return super().__iter__()

    def map(self, map_func: Any, *args: Any, **kwargs: Any) -> tf.data.Dataset:
        """Maps the elements. Rejects the map with which Keras applies `class_weight`.

        Raises:
            ValueError: If Keras maps the elements for `fit(class_weight=...)` of a plain model.
        """
        if _compat.weighs_classes(map_func):
            allowed = (
                "None, because Keras does not combine class weights with sample weights and would "
                "fetch batches ahead of the windows. Call slipstream.apply(data, class_weight=...) "
                "or use a slip.keras.Model"
            )
            raise invalid("class_weight", "a dictionary", "fit with Slipstream", allowed)
        return super().map(map_func, *args, **kwargs)

    def cardinality(self) -> tf.Tensor:
        """Returns the maximum number of batches in a pass, int64 [].

        It is negative if unknown.
        """
        if self._maximum is None:
            return super().cardinality()
        return tf.constant(self._maximum, tf.int64)


class EpochWatch:
    """Corrects Keras's warnings about the length of epochs in `fit`.

    With skipping, an epoch has fewer batches than Keras expects, and Keras warns that the input ran
    out of data. This warning is false and is filtered. If the length of the data is unknown, Keras
    silently cuts later epochs that have more batches than the first one. This class then logs a
    warning.
    """

    def __init__(self) -> None:
        """Starts outside of `fit`."""
        self._first: int | None = None
        self._calls = 0
        self._end: weakref.finalize[Any, EpochWatch] | None = None

    def begin_fit(self, steps_are_given: bool) -> None:
        """Begins a `fit`.

        Args:
            steps_are_given: Whether the user passed `steps_per_epoch`.
        """
        self.end_fit()
        self._first = None
        if not steps_are_given:
            warnings.filterwarnings("ignore", _RAN_OUT, UserWarning)
            # An aborted `fit` does not call `end_fit`. The finalizer removes the filter at the
            # latest when this object is deleted.
            self._end = weakref.finalize(self, _remove_filter, warnings.filters[0])

    def end_fit(self) -> None:
        """Ends the current `fit`."""
        if self._end is not None:
            self._end()
        self._end = None

    def begin_epoch(self) -> None:
        """Begins an epoch with no calls."""
        self._calls = 0

    def count(self) -> None:
        """Counts a call of the train function."""
        self._calls += 1

    def end_epoch(self, epoch: int, is_length_known: bool) -> None:
        """Ends an epoch and warns if Keras cut it off.

        Args:
            epoch: Index of the epoch, from 0.
            is_length_known: Whether Keras knew the number of batches.
        """
        if self._first is None:
            self._first = self._calls
        elif not is_length_known and self._calls > self._first:
            # Keras also counts the call that reached the end of the data.
            logging.warning(
                "Keras ended epoch %d after %d batches, because the first epoch had %d batches. "
                "The rest of the data was not trained. To set the number of batches, call "
                ".apply(tf.data.experimental.assert_cardinality(batches)) before Slipstream.apply.",
                epoch + 1,
                self._calls,
                self._first,
            )


def _remove_filter(item: Any) -> None:
    if item in warnings.filters:
        warnings.filters.remove(item)  # type: ignore[attr-defined]


class StepPlan:
    """Counts the steps that training would take without skipping.

    Attributes:
        batches: Number of batches in a pass over the data, or None if unknown.
        steps: Number of planned steps from the start of training.
    """

    def __init__(
        self, tracker: SaturationTracker, comm: Communicator, changed: Callable[[], None]
    ) -> None:
        """Starts without a plan.

        Args:
            tracker: Receives the number of planned steps.
            comm: Communicator of the ranks.
            changed: Called when the plan, and possibly the window length, has changed.
        """
        self._tracker, self._comm, self._changed = tracker, comm, changed
        self.batches: int | None = None
        self.steps = 0
        self._of_epoch = 0
        self._next_fit_is_planned = self._was_exceeded = False

    def add_epochs(self, epochs: int, steps: int | None = None) -> bool:
        """Adds epochs to the plan.

        Collective operation: with multiple ranks, all ranks must call it.

        Args:
            epochs: Number of additional epochs.
            steps: Number of steps in an epoch. None means `batches`.

        Returns:
            True if the number of steps is known or was planned before.
        """
        self._of_epoch = 0
        if self._next_fit_is_planned:
            # This `fit` continues after a restore, and its epochs are already planned.
            self._next_fit_is_planned = False
            return True
        if steps is None:
            steps = self.batches
        steps = max_known(self._comm, steps, "slipstream.planned")
        if steps is None:
            return False
        self._of_epoch = steps
        self._set(self.steps + epochs * steps)
        return True

    def is_exceeded_by(self, step: int) -> bool:
        """Returns whether to warn that training has exceeded the plan.

        True at most once: at the first step after the planned steps, if the warm-up depends on the
        plan. Always False if `add_epochs` has not planned the current `fit` since the last restore.

        Args:
            step: Number of trained steps.
        """
        if self._was_exceeded or not self._of_epoch or step <= self.steps:
            return False
        self._was_exceeded = self._tracker.goes_by_plan
        return self._was_exceeded

    def drop_epochs(self, epochs: int) -> None:
        """Removes epochs from the plan of the last `add_epochs`.

        `fit(initial_epoch=)` does not train them.

        Args:
            epochs: Number of epochs to remove.
        """
        self._set(self.steps - epochs * self._of_epoch)

    def restore(self, steps: int, is_in_fit: bool = False) -> None:
        """Continues from a saved plan.

        Args:
            steps: The saved number of planned steps.
            is_in_fit: Whether the `fit` that continues the training has already begun. If not, the
                next `add_epochs` adds nothing, because its epochs are part of the saved plan.
        """
        self.steps, self._of_epoch = steps, 0
        self._next_fit_is_planned = steps > 0 and not is_in_fit

    def _set(self, steps: int) -> None:
        self.steps = steps
        self._tracker.plan(steps)
        self._changed()


def current_window(tracker: SaturationTracker) -> str:
    """Returns a sentence about the progress of the current window.

    The string is empty at the start of the window.
    """
    length = tracker.window_steps
    steps = length - tracker.steps_left
    if not steps:
        return ""
    now = tracker.classifier.counts()
    return (
        f"The current window has {steps:,} of {length:,} steps, {now.examples_seen:,} examples and "
        f"{now.examples_skipped:,} skipped examples."
    )
