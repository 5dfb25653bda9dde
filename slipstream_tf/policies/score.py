"""What every score answers; `SkipExamples` asks."""

from collections.abc import Mapping
from typing import Any


class Score:
    """Base of the scores.

    Attributes:
        alpha: share of an example's lookups that must be saturated, above 0, at most 1.
        probes_every: windows from probe to probe of a saturated key; 0: none; None: no matter.
        default_share: to skip, where nobody gives one; None: that of all policies.
        steered_by: see `policies.Policy`.
        correct: how what is thinned by foreseen losses is corrected: "weight", "offset"; "": it is
            not thinned by them.
    """

    alpha: float = 1.0
    probes_every: int | None = 100
    default_share: float | None = None
    steered_by = "share"
    correct: str = ""

    def require_share(self, share: float, keep: float) -> None:
        """Raises ValueError for a share, or thinning, of `SkipExamples` that it cannot have."""

    def key_share(self, share: float) -> float | None:
        """Returns the share of the hot examples whose keys are to count as saturated; None: any.

        Args:
            share: of the hot examples, to skip.
        """
        raise NotImplementedError

    @property
    def pilot_settings(self) -> dict[str, Any]:
        """See `policies.Policy.pilot_settings`."""
        return {}

    def initial_state(self) -> dict[str, Any]:
        """See `policies.Policy.initial_state`."""
        return {}

    def next_state(self, state: Mapping[str, Any], ended: Any) -> dict[str, Any]:
        """See `policies.Policy.next_state`."""
        return dict(state)

    def value_of_skipped(self, state: Mapping[str, Any], losses: Any) -> float | None:
        """See `policies.Policy.value_of_skipped`."""
        return None

    def rule(self, state: Mapping[str, Any], begins: Any) -> dict[str, Any]:
        """Returns the mode and threshold of `ops.classifier.InputClassifier.configure`."""
        raise NotImplementedError
