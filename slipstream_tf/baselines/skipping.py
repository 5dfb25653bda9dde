"""Baselines that skip examples: the rule of the paper, and random skipping."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf.engine.report import WindowReport
from slipstream_tf.policies.base import Policy, WindowStart
from slipstream_tf.policies.skip_examples import Score


@dataclasses.dataclass(frozen=True)
class RowDrift(Score):
    """Scores examples by the drift of their rows, as in the paper.

    The drift of a row is the distance that it moved during the last window. With `alpha=1`, the
    score of an example is the largest drift of its keys. With a smaller `alpha`, it is the smallest
    drift that at least this fraction of its keys does not exceed. The score is infinite if too few
    of the keys are tracked. Therefore `SkipExamples` skips examples with saturated keys (arXiv
    2404.04270).

    Note: this is a baseline. In all measurements, random skipping was at least as good at equal
    cost.

    Example:

    >>> policy = slip.SkipExamples(slip.RowDrift(), fraction=0.3)
    >>> policy.score.alpha
    1.0

    Args:
        alpha: Fraction of an example's keys that must be saturated for the example to be skippable,
            in (0, 1]. Defaults to 1, as in the paper.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        alpha = require_number("alpha", self.alpha, 0.0, 1.0, "RowDrift", open_minimum=True)
        object.__setattr__(self, "alpha", alpha)

    def classifier_settings(self, state: Mapping[str, Any], start: Any) -> dict[str, Any]:
        return {"mode": "drift", "threshold": start.threshold}


@dataclasses.dataclass(frozen=True)
class SkipAtRandom(Policy):
    """Skips a given fraction of random examples, as a control.

    Use it to compare a policy with random skipping at equal cost. `fractions[0]` applies to the
    first window that begins after the warm-up, `fractions[1]` to the second, and so on. The last
    entry applies to all later windows. Without a warm-up, `fractions[0]` applies from the first
    step. `random_fractions` returns the fractions of another run.

    Example:

    >>> slip.baselines.SkipAtRandom(fractions=[0.1, 0.2]).fractions
    (0.1, 0.2)

    Args:
        fractions: Fractions to skip, at least one, each in [0, 1].
    """

    fractions: Sequence[float]
    acts_on = "examples"
    verb = "skipped"
    columns = ("skipped", "skipped fraction")

    def __post_init__(self) -> None:
        place = "SkipAtRandom"
        if isinstance(self.fractions, (int, float)) or not len(tuple(self.fractions)):
            allowed = "a non-empty sequence of fractions, for example (0.3,)"
            raise invalid("fractions", self.fractions, place, allowed)
        fractions = (
            require_number("fractions", fraction, 0.0, 1.0, place) for fraction in self.fractions
        )
        object.__setattr__(self, "fractions", tuple(fractions))

    def classifier_settings(self, state: Mapping[str, Any], start: WindowStart) -> dict[str, Any]:
        fraction = self.fractions[min(start.windows, len(self.fractions)) - 1]
        return {"mode": "random", "random_fraction": fraction}


def random_fractions(reports: Iterable[WindowReport]) -> tuple[float, ...]:
    """Returns the fractions with which `SkipAtRandom` repeats another run.

    Args:
        reports: Reports of a run with `SkipExamples` and the same warm-up and window length.

    Returns:
        The fraction skipped in each window that began after the warm-up, or (0.0,) if there is no
        such window.
    """
    return tuple(r.skipped_fraction for r in reports if not r.is_warming_up) or (0.0,)
