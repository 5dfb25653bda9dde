"""Skips examples by a score (the input classifier of Slipstream, arXiv 2404.04270)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf.policies.base import DEFAULT_FRACTION, Decisions, Policy, WindowStart


class Score(Decisions):
    """Base class of the scores by which `SkipExamples` chooses examples.

    Attributes:
        default_fraction: Default fraction of examples to skip, or None for the default of all
            policies.
    """

    revisit_every: int | None = 100
    steered_by: str = "fraction"
    default_fraction: float | None = None

    def require_fraction(self, fraction: float, keep_rate: float) -> None:
        """Raises ValueError for values of `SkipExamples` that the score does not support.

        Args:
            fraction: Fraction of the examples to skip.
            keep_rate: Fraction of the skippable examples to keep.
        """

    def key_fraction(self, fraction: float) -> float | None:
        """Returns the fraction of hot examples that should be skippable by drift.

        Args:
            fraction: Fraction of the hot examples to skip.

        Returns:
            The fraction, or None if the score does not depend on the saturation of keys.
        """
        return fraction

    def classifier_settings(self, state: Mapping[str, Any], start: WindowStart) -> dict[str, Any]:
        """Returns the arguments of `ops.classifier.InputClassifier.configure`.

        Args:
            state: State of the score in the window that begins.
            start: The window that begins.

        Returns:
            The mode, and its threshold and keep rate where the mode has them.
        """
        raise NotImplementedError


def _of_score(name: str) -> Any:
    """Returns a property that reads attribute `name` of the score."""
    return property(lambda policy: getattr(policy.score, name))


@dataclasses.dataclass(frozen=True)
class SkipExamples(Policy):
    """Drops examples with little training value and refills the batches.

    The score `score` decides which examples are skippable. Skippable examples are dropped before
    they reach the model, so that a step on a full batch covers more of the data. Note: with
    `PredictedLoss(pilot="model")`, examples are dropped after a forward pass of the model, and
    batches are not refilled.

    Example:

    >>> policy = slip.SkipExamples(slip.PredictedLoss(), fraction=0.7)
    >>> policy.fraction
    0.7
    >>> policy.verb
    'skipped'

    Args:
        score: The score: a `PredictedLoss`, or a `RowDrift` (the rule of the paper, a baseline).
        fraction: Fraction to skip, in (0, 1]. With `PredictedLoss`: of all examples, below 1, by
            default 0.5. With `RowDrift`: of the hot examples, which have enough tracked keys for a
            finite score, by default 0.3, unless `Saturation(threshold=)` sets the threshold.
        keep_rate: Fraction of the skippable examples to train on nevertheless, with weight 1 /
            keep_rate, in [0, 1). Defaults to 0, as in the paper. Not supported with
            `PredictedLoss`, which has `min_keep_probability`.
    """

    score: Score
    fraction: float | None = None
    keep_rate: float = 0.0
    acts_on = "examples"
    verb = "skipped"
    columns = ("skipped", "skipped fraction", "kept")
    alpha = _of_score("alpha")
    revisit_every = _of_score("revisit_every")
    pilot_settings = _of_score("pilot_settings")
    steered_by = _of_score("steered_by")
    correction = _of_score("correction")
    initial_state = _of_score("initial_state")
    next_state = _of_score("next_state")
    value_of_skipped = _of_score("value_of_skipped")

    def __post_init__(self) -> None:
        place = "SkipExamples"
        if not isinstance(self.score, Score):
            allowed = "slipstream_tf.PredictedLoss(...) or slipstream_tf.RowDrift(...)"
            raise invalid("score", self.score, place, allowed)
        if self.fraction is not None:
            fraction = require_number("fraction", self.fraction, 0.0, 1.0, place, True)
            object.__setattr__(self, "fraction", fraction)
        keep_rate = require_number("keep_rate", self.keep_rate, 0.0, 1.0, place)
        object.__setattr__(self, "keep_rate", keep_rate)
        if keep_rate == 1.0:
            allowed = "a number >= 0 and < 1. Pass dry_run=True to keep every example"
            raise invalid("keep_rate", 1.0, place, allowed)
        self.score.require_fraction(self.target_fraction, keep_rate)

    @property
    def key_fraction(self) -> float | None:
        return self.score.key_fraction(self.target_fraction)

    @property
    def sets_key_fraction(self) -> bool:  # type: ignore[override]
        return self.fraction is not None

    @property
    def target_fraction(self) -> float:
        default = (
            DEFAULT_FRACTION if self.score.default_fraction is None else self.score.default_fraction
        )
        return default if self.fraction is None else self.fraction

    @property
    def weighs_examples(self) -> bool:  # type: ignore[override]
        return self.keep_rate > 0.0 or self.correction == "weight"

    def classifier_settings(
        self, state: Mapping[str, Any], start: WindowStart
    ) -> dict[str, Any] | None:
        return {"keep_rate": self.keep_rate, **self.score.classifier_settings(state, start)}
