"""Baselines that skip examples: the paper's rule, and random skipping at equal cost."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf.engine.report import WindowReport
from slipstream_tf.policies.base import Begins, Policy
from slipstream_tf.policies.skip_examples import Score


@dataclasses.dataclass(frozen=True)
class RowDrift(Score):
    """The paper's rule (arXiv 2404.04270): skip examples whose keys are saturated.

    A baseline: at equal cost it was no better than random skipping wherever it was measured.

    Attributes:
        alpha: share of an example's lookups that must be saturated, above 0, at most 1 (paper: 1).
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        alpha = require_number("alpha", self.alpha, 0.0, 1.0, "RowDrift", open_minimum=True)
        object.__setattr__(self, "alpha", alpha)

    def rule(self, state: Mapping[str, Any], begins: Any) -> dict[str, Any]:
        return {"mode": "drift", "threshold": begins.threshold}


@dataclasses.dataclass(frozen=True)
class SkipAtRandom(Policy):
    """Control: leaves out as many examples as another run did, whatever their keys.

    The i-th window that begins at or after the end of the warm-up skips `shares[i]`; the last one
    repeats. Without a warm-up that starts with the first step. `random_shares` gives the shares of
    a run.

    Attributes:
        shares: to skip, each 0 to 1; one or more.
    """

    shares: Sequence[float]
    acts_on = "examples"
    verb = "skipped"
    columns = ("skipped", "skipped share")

    def __post_init__(self) -> None:
        place = "SkipAtRandom"
        if isinstance(self.shares, (int, float)) or not len(tuple(self.shares)):
            raise invalid("shares", self.shares, place, "a sequence of one share or more")
        shares = (require_number("shares", share, 0.0, 1.0, place) for share in self.shares)
        object.__setattr__(self, "shares", tuple(shares))

    def example_rule(self, state: Mapping[str, Any], begins: Begins) -> dict[str, Any]:
        share = self.shares[min(begins.windows, len(self.shares)) - 1]
        return {"mode": "random", "random_share": share}


def random_shares(reports: Iterable[WindowReport]) -> tuple[float, ...]:
    """Returns the shares for `SkipAtRandom`, the control run of the run that reported.

    Args:
        reports: of a run with `SkipExamples`, and the same warm-up and window length.

    Returns:
        The share that was skipped in each window that began after the warm-up; (0.0,) if none did.
    """
    return tuple(r.skipped_share for r in reports if not r.is_warming_up) or (0.0,)
