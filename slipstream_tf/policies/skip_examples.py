"""Skips examples by a score (Slipstream's input classifier block)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf.policies.base import DEFAULT_SHARE, Begins, Decisions, Policy


class Score(Decisions):
    """Base of the scores.

    Attributes:
        default_share: to skip, if the user gives none; None: the default of all policies.
    """

    probes_every: int | None = 100
    steered_by: str = "share"
    default_share: float | None = None

    def require_share(self, share: float, keep: float) -> None:
        """Raises ValueError for a share, or a keep rate, of `SkipExamples` that cannot be."""

    def key_share(self, share: float) -> float | None:
        """Returns the share of the hot examples whose keys are to count as saturated; None: any.

        Args:
            share: of the hot examples, to skip.
        """
        return share

    def rule(self, state: Mapping[str, Any], begins: Begins) -> dict[str, Any]:
        """Returns the mode and threshold of `ops.classifier.InputClassifier.configure`."""
        raise NotImplementedError


def _of_score(name: str) -> Any:
    """Returns a property that reads the score's attribute, or method, of that name."""
    return property(lambda policy: getattr(policy.by, name))


@dataclasses.dataclass(frozen=True)
class SkipExamples(Policy):
    """Leaves out examples that teach nothing, and refills the batches.

    Attributes:
        by: what makes an example skippable: a `ForeseenLoss`, or a `RowDrift` (the paper's rule, a
            baseline).
        share: of the hot examples (those with a finite score), to skip, above 0, at most 1. None:
            0.3, or what `Saturation(threshold=)` makes of it; by `ForeseenLoss` 0.5.
        keep: share of the skippable examples that is trained all the same, with weight 1 / keep;
            0 to below 1 (paper: 0). Not with `ForeseenLoss`, which has a floor.
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
