"""An example is skippable if the rows of its keys have settled (the paper's rule)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream_tf._utils.errors import require_number
from slipstream_tf.policies.score import Score


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

    def key_share(self, share: float) -> float:
        """See `Score`."""
        return share

    def rule(self, state: Mapping[str, Any], begins: Any) -> dict[str, Any]:
        """See `Score`."""
        return {"mode": "drift", "threshold": begins.threshold}
