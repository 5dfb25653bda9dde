"""Estimates how long ranks take to exchange the rows of a step.

`estimate_exchange` is a pure function of a `Link` and the window reports of a run with multiple
ranks. The estimate assumes that all messages of a collective are sent at the same time, with one
latency. It ignores that the exchange can overlap with other work.
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from slipstream_tf._utils.comm import CHOICES, Link, copies_of
from slipstream_tf.engine.report import Totals, WindowReport

# Seconds to add one gradient row to the deferred sums. Measured as 2.2 ms for a step of 53,000
# rows, see benchmarks/notes.md.
_SECONDS_TO_DEFER = 4e-8
_WIDTH = 99


@dataclasses.dataclass(frozen=True)
class ExchangeEstimate:
    """The estimated time of exchanging the rows of a step.

    Attributes:
        link: Speed of messages between the ranks.
        rows: Number of gradient rows per rank and step.
        floats: Mean number of values per row.
        ranks: Number of ranks.
        is_spread: Whether each row has one owner. If so, lookups fetch rows from their owners, as
            many rows as there are gradient rows.
        sent_fraction: Fraction of the gradient rows that would have been sent. 1 means all rows.
        defers: Whether other rows would have been deferred, which takes time. Masking takes no
            time.
    """

    link: Link
    rows: float
    floats: float
    ranks: int
    is_spread: bool = False
    sent_fraction: float = 1.0
    defers: bool = False

    def seconds(self, dtype: str, sent_fraction: float = 1.0) -> float:
        """Returns the seconds of a step's messages.

        Args:
            dtype: The wire dtype of the values, one of `config.WIRE_DTYPES`.
            sent_fraction: Fraction of the gradient rows that are sent.
        """
        gradients = self._of(sent_fraction * self.rows, dtype)
        if not self.is_spread:
            return self.link.latency + gradients
        # Three consecutive messages: requested keys, rows, gradients.
        return 3 * self.link.latency + self._of(self.rows, dtype) + gradients

    def _of(self, rows: float, dtype: str) -> float:
        return self.link.seconds(rows, self.floats, dtype, copies_of(self.ranks, self.is_spread))

    @property
    def auto(self) -> str:
        """The dtype that `wire_dtype="auto"` chooses."""
        return self.link.choose(self.floats, copies_of(self.ranks, self.is_spread))

    @property
    def seconds_to_defer(self) -> float:
        """Seconds per step to defer rows; 0 if no rows are deferred."""
        return self.rows * _SECONDS_TO_DEFER if self.defers else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the link and the seconds per dtype as JSON-serializable values."""
        return {
            "bytes_per_second": self.link.bytes_per_second,
            "latency": self.link.latency,
            "rows": self.rows,
            "sent_fraction": self.sent_fraction,
            "seconds": {dtype: self.seconds(dtype) for dtype in CHOICES},
            "seconds_of_sent": {
                dtype: self.seconds(dtype, self.sent_fraction) + self.seconds_to_defer
                for dtype in CHOICES
            },
            "auto": self.auto,
        }

    def __str__(self) -> str:
        details = ", ".join(f"{dtype} {_ms(self.seconds(dtype))}" for dtype in CHOICES)
        lines = [
            f"Estimated time to exchange the rows of a step on this link ({self.link}): {details}. "
            f'For these rows, wire_dtype="auto" chooses {self.auto}.'
        ]
        plain = self.seconds(self.auto)
        if self.sent_fraction < 1.0:
            less = self.seconds(self.auto, self.sent_fraction) + self.seconds_to_defer
            own = f", including {_ms(self.seconds_to_defer)} to defer the other rows"
            lines.append(
                f"If {self.sent_fraction:.0%} of the gradient rows are sent, {self.auto} takes "
                f"{_ms(less)}{own if self.defers else ''}. {_verdict(plain - less)}"
            )
        return "\n".join(textwrap.fill(line, _WIDTH) for line in lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _verdict(saved: float) -> str:
    return f"This saves {_ms(saved)} per step." if saved > 0 else "This saves no time."


def estimate_exchange(
    reports: Sequence[WindowReport], link: Link | None, ranks: int, is_spread: bool
) -> ExchangeEstimate | None:
    """Estimates the exchange of a step from the windows after the warm-up.

    Args:
        reports: The reports of all windows, in order.
        link: Speed of messages between the ranks. None if it was not measured.
        ranks: Number of ranks.
        is_spread: Whether each row has one owner.

    Returns:
        The estimate. None if there is no link, no window after the warm-up or no gradient row.
    """
    active = [report for report in reports if not report.is_warming_up]
    before = [report for report in reports if report.is_warming_up]
    if link is None or not active:
        return None
    rows = Totals(active).rows
    steps = active[-1].step - (before[-1].step if before else 0)
    values = sum(t.rows.offered * t.dim for report in active for t in report.tables)
    if not rows.offered or steps <= 0:
        return None
    per_step = rows.offered / (steps * ranks)
    fraction = rows.sent / rows.offered
    defers = rows.offered > rows.sent + rows.masked
    floats = values / rows.offered
    return ExchangeEstimate(link, per_step, floats, ranks, is_spread, fraction, defers)
