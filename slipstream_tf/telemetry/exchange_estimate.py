"""What the exchange of a step's rows takes on the ranks' link, and what would shorten it. Pure.

In: a `Link`, and the windows' reports of a run of several ranks. Out: a frozen `ExchangeEstimate`,
in words and as JSON. What is estimated is one message for each rank and direction, without what
overlaps with it.
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from slipstream_tf._utils.comm import CHOICES, Link, copies_of
from slipstream_tf.engine.report import WindowReport
from slipstream_tf.telemetry.ledger import Ledger

# Seconds to add a gradient row to the deferred ones: 2.2 ms for a step of 53,000 rows, as measured
# in benchmarks/notes.md.
_SECONDS_TO_DEFER = 4e-8
_WIDTH = 99


@dataclasses.dataclass(frozen=True)
class ExchangeEstimate:
    """What a step's exchange of rows takes.

    Attributes:
        link: between the ranks.
        rows: gradient rows of a rank and step.
        floats: values of a row, on average.
        ranks: of the job.
        is_spread: whether each row has one owner, from which it comes to where it is looked up; as
            many rows as gradients go there.
        sent_share: of the gradient rows, those that would have been sent; 1: all of them.
        defers: whether others would have been deferred, which takes time; masking takes none.
    """

    link: Link
    rows: float
    floats: float
    ranks: int
    is_spread: bool = False
    sent_share: float = 1.0
    defers: bool = False

    def seconds(self, dtype: str, sent_share: float = 1.0) -> float:
        """Returns what a step's messages take.

        Args:
            dtype: of values, one of `link.WIRE_DTYPES`.
            sent_share: of the gradient rows, those that are sent.
        """
        gradients = self._of(sent_share * self.rows, dtype)
        if not self.is_spread:
            return self.link.latency + gradients
        # Keys that ask for rows, then the rows, then the gradients, in turn.
        return 3 * self.link.latency + self._of(self.rows, dtype) + gradients

    def _of(self, rows: float, dtype: str) -> float:
        return self.link.seconds(rows, self.floats, dtype, copies_of(self.ranks, self.is_spread))

    @property
    def auto(self) -> str:
        """What `wire_dtype="auto"` takes."""
        return self.link.choose(self.floats, copies_of(self.ranks, self.is_spread))

    @property
    def seconds_to_defer(self) -> float:
        """What a step takes longer for deferring, before it sends less; 0 without."""
        return self.rows * _SECONDS_TO_DEFER if self.defers else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the link and the seconds of each way as JSON-serialisable values."""
        return {
            "bytes_per_second": self.link.bytes_per_second,
            "latency": self.link.latency,
            "rows": self.rows,
            "sent_share": self.sent_share,
            "seconds": {dtype: self.seconds(dtype) for dtype in CHOICES},
            "seconds_of_sent": {
                dtype: self.seconds(dtype, self.sent_share) + self.seconds_to_defer
                for dtype in CHOICES
            },
            "auto": self.auto,
        }

    def __str__(self) -> str:
        told = ", ".join(f"{dtype} {_ms(self.seconds(dtype))}" for dtype in CHOICES)
        lines = [
            f"The exchange of a step's rows would take, on this link ({self.link}): {told}. "
            f'By these rows wire_dtype="auto" would take {self.auto}.'
        ]
        plain = self.seconds(self.auto)
        if self.sent_share < 1.0:
            less = self.seconds(self.auto, self.sent_share) + self.seconds_to_defer
            own = f", of which {_ms(self.seconds_to_defer)} to defer the others"
            lines.append(
                f"With {self.sent_share:.0%} of the gradient rows sent, {self.auto} would take "
                f"{_ms(less)}{own if self.defers else ''}: {_verdict(plain - less)}"
            )
        return "\n".join(textwrap.fill(line, _WIDTH) for line in lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _verdict(saved: float) -> str:
    return f"{_ms(saved)} less." if saved > 0 else "it does not pay here."


def estimate_exchange(
    reports: Sequence[WindowReport], link: Link | None, ranks: int, is_spread: bool
) -> ExchangeEstimate | None:
    """Estimates a step's exchange by the windows after the warm-up; None: none, or no link.

    Args:
        reports: of the windows, from the first on.
        link: between the ranks; None: it was not measured.
        ranks: of the job.
        is_spread: whether each row has one owner.
    """
    active = [report for report in reports if not report.is_warming_up]
    before = [report for report in reports if report.is_warming_up]
    if link is None or not active:
        return None
    rows = Ledger(active).rows
    steps = active[-1].step - (before[-1].step if before else 0)
    values = sum(t.rows.offered * t.dim for report in active for t in report.tables)
    if not rows.offered or steps <= 0:
        return None
    per_step = rows.offered / (steps * ranks)
    share = rows.sent / rows.offered
    defers = rows.offered > rows.sent + rows.masked
    floats = values / rows.offered
    return ExchangeEstimate(link, per_step, floats, ranks, is_spread, share, defers)
