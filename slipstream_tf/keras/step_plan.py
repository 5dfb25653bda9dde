"""How many steps training takes, as far as the `fit`s that have begun tell: the warm-up is a share.

In: epochs, and the steps of one. Out: what the tracker is told.
"""

from collections.abc import Callable

from slipstream_tf._utils.agreement import most_known
from slipstream_tf._utils.comm import Communicator
from slipstream_tf.engine.tracker import SaturationTracker


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


def present_window(tracker: SaturationTracker, length: int) -> str:
    """Says what the present window has seen, which goes on; empty at its start.

    Args:
        tracker: whose window it is.
        length: of a window, in steps.
    """
    steps = length - tracker.steps_left
    if not steps:
        return ""
    now = tracker.classifier.counts()
    return (
        f"The present window goes on: {steps:,} of {length:,} steps, {now.examples_seen:,} "
        f"examples, {now.examples_skipped:,} skipped."
    )
