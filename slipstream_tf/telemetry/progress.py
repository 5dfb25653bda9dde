"""The bar that a training run shows: loss, AUC, examples/s, share skipped, time left."""

import sys
from typing import Any, TextIO

import tqdm

_SECONDS_BETWEEN_LINES = 10.0  # Where the output is no terminal, e.g. a log file.
_SECONDS_BETWEEN_DRAWS = 0.2


def open_bar(
    total: int | None, title: str, stream: TextIO | None = None, **options: Any
) -> tqdm.tqdm:
    """Opens a bar that is drawn often on a terminal, and seldom in a log file.

    Args:
        total: of what is counted, or None if that is not known.
        title: short text in front of the bar.
        stream: where to; default: standard error.
        **options: of tqdm.
    """
    stream = sys.stderr if stream is None else stream
    is_terminal = stream.isatty()
    seconds = _SECONDS_BETWEEN_DRAWS if is_terminal else _SECONDS_BETWEEN_LINES
    options.update(file=stream, dynamic_ncols=is_terminal, mininterval=seconds)
    return tqdm.tqdm(total=total, desc=title, **options)


class TrainingBar:
    """A progress bar over the examples that a run sees, trained and skipped alike.

    Counting skipped examples keeps the time left right: they are part of the work that is planned.

    Args:
        planned_inputs: examples that the run will see, or None if that is not known.
        title: short text in front of the bar.
        is_shown: whether anything is written.
        stream: where to; default: standard error.
    """

    def __init__(
        self,
        planned_inputs: int | None,
        title: str = "training",
        is_shown: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        options = {"unit": " examples", "unit_scale": True, "disable": not is_shown}
        self._bar = open_bar(planned_inputs, title, stream, **options)

    def update(
        self, examples_seen: int, examples_trained: int, loss: float | None, auc: float | None
    ) -> None:
        """Shows the state after a step.

        Args:
            examples_seen: since the start: trained and skipped.
            examples_trained: since the start.
            loss: mean training loss so far.
            auc: of the examples trained so far.
        """
        skipped = 1.0 - examples_trained / examples_seen if examples_seen else 0.0
        parts = [f"skipped {skipped:.1%}"]
        if auc is not None:
            parts.insert(0, f"AUC {auc:.4f}")
        if loss is not None:
            parts.insert(0, f"loss {loss:.4f}")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.update(examples_seen - self._bar.n)

    def close(self) -> None:
        """Draws the last state and ends the line."""
        self._bar.close()

    def __enter__(self) -> "TrainingBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
