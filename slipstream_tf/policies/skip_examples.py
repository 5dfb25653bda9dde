"""Skips examples by a score (the input classifier of Slipstream, arXiv 2404.04270)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf.policies.base import DEFAULT_SHARE, Begins, Decisions, Policy


class Score(Decisions):
    """Base class of the scores by which `SkipExamples` chooses examples.

    Attributes:
        default_share: Default fraction of examples to skip, or None for the default of all
            policies.
    """

    probes_every: int | None = 100
    steered_by: str = "share"
    default_share: float | None = None

    def require_share(self, share: float, keep: float) -> None:
        """Raises ValueError for values of `SkipExamples` that the score does not support.

        Args:
            share: Fraction of the examples to skip.
            keep: Fraction of the skippable examples to keep.
        """

    def key_share(self, share: float) -> float | None:
        """Returns the fraction of hot examples that should be skippable by drift.

        Args:
            share: Fraction of the hot examples to skip.

        Returns:
            The fraction, or None if the score does not depend on the saturation of keys.
        """
        return share

    def rule(self, state: Mapping[str, Any], begins: Begins) -> dict[str, Any]:
        """Returns the arguments of `ops.classifier.InputClassifier.configure`.

        Args:
            state: State of the score in the window that begins.
            begins: The window that begins.

        Returns:
            The mode, and its threshold and keep rate where the mode has them.
        """
        raise NotImplementedError


def _of_score(name: str) -> Any:
    """Returns a property that reads attribute `name` of the score."""
    return property(lambda policy: getattr(policy.by, name))


@dataclasses.dataclass(frozen=True)
class SkipExamples(Policy):
    """Drops examples with little training value and refills the batches.

    The score `by` decides which examples are skippable. Skippable examples are dropped before they
    reach the model, so that a step on a full batch covers more of the data. Note: with
    `ForeseenLoss(pilot="model")`, examples are dropped after a forward pass of the model, and
    batches are not refilled.

    Example:

    >>> policy = slip.SkipExamples(slip.ForeseenLoss(), share=0.7)
    >>> policy.share
    0.7
    >>> policy.verb
    'skipped'

    Args:
        by: The score: a `ForeseenLoss`, or a `RowDrift` (the rule of the paper, a baseline).
        share: Fraction to skip, in (0, 1]. With `ForeseenLoss`: of all examples, below 1, by
            default 0.5. With `RowDrift`: of the hot examples, which have enough tracked keys for a
            finite score, by default 0.3, unless `Saturation(threshold=)` sets the threshold.
        keep: Fraction of the skippable examples to train on nevertheless, with weight 1 / keep, in
            [0, 1). Defaults to 0, as in the paper. Not supported with `ForeseenLoss`, which has a
            floor.
    """

    by: Score
    share: float | None = None
    keep: float = 0.0
    acts_on = "examples"
    verb = "skipped"
    columns = ("skipped", "skipped share", "kept")
    alpha = _of_score("alpha")
    probes_every = _of_score("probes_every")
    pilot_settings = _of_score("pilot_settings")
    steered_by = _of_score("steered_by")
    correct = _of_score("correct")
    initial_state = _of_score("initial_state")
    next_state = _of_score("next_state")
    value_of_skipped = _of_score("value_of_skipped")

    def __post_init__(self) -> None:
        place = "SkipExamples"
        if not isinstance(self.by, Score):
            allowed = "slipstream_tf.ForeseenLoss(...) or RowDrift(...)"
            raise invalid("by", self.by, place, allowed)
        if self.share is not None:
            share = require_number("share", self.share, 0.0, 1.0, place, True)
            object.__setattr__(self, "share", share)
        keep = require_number("keep", self.keep, 0.0, 1.0, place)
        object.__setattr__(self, "keep", keep)
        if keep == 1.0:
            raise invalid("keep", 1.0, place, "below 1 (dry_run=True keeps every example)")
        self.by.require_share(self.target_share, keep)

    @property
    def key_share(self) -> float | None:
        return self.by.key_share(self.target_share)

    @property
    def gives_key_share(self) -> bool:  # type: ignore[override]
        return self.share is not None

    @property
    def target_share(self) -> float:
        default = DEFAULT_SHARE if self.by.default_share is None else self.by.default_share
        return default if self.share is None else self.share

    @property
    def weighs_examples(self) -> bool:  # type: ignore[override]
        return self.keep > 0.0 or self.correct == "weight"

    def example_rule(self, state: Mapping[str, Any], begins: Begins) -> dict[str, Any] | None:
        return {"keep_rate": self.keep, **self.by.rule(state, begins)}
