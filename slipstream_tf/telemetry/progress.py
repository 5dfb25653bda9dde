"""The progress bar of a training run.

Shows loss, AUC, examples per second, the skipped fraction and the time left.
"""

import sys
from typing import Any, TextIO

import tqdm

_SECONDS_BETWEEN_LINES = 10.0  # Used if the output is not a terminal, for example a log file.
_SECONDS_BETWEEN_DRAWS = 0.2


def open_bar(
    total: int | None, title: str, stream: TextIO | None = None, **options: Any
) -> tqdm.tqdm:
    """Opens a progress bar that is redrawn less often in log files.

    Args:
        total: Number of items, or None if unknown.
        title: Short text in front of the bar.
        stream: Output stream. Defaults to standard error.
        **options: Options of tqdm.
    """
    stream = sys.stderr if stream is None else stream
    is_terminal = stream.isatty()
    seconds = _SECONDS_BETWEEN_DRAWS if is_terminal else _SECONDS_BETWEEN_LINES
    options.update(file=stream, dynamic_ncols=is_terminal, mininterval=seconds)
    return tqdm.tqdm(total=total, desc=title, **options)


class TrainingBar:
    """A progress bar over all examples of a run, trained and skipped.

    Skipped examples count, because they are part of the planned work. Otherwise the time left would
    be wrong.

    Args:
        planned_inputs: Number of examples in the run, or None if unknown.
        title: Short text in front of the bar.
        is_shown: Whether to write the bar.
        stream: Output stream. Defaults to standard error.
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
            examples_seen: Number of examples since the start, trained and skipped.
            examples_trained: Number of trained examples since the start.
            loss: Mean training loss since the start.
            auc: AUC of the examples trained since the start.
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
