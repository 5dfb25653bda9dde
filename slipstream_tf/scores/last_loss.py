"""An example is skippable if its last loss was low, and the rows of its keys have settled."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream_tf.config import parse_bytes
from slipstream_tf.errors import invalid, require_integer, require_number
from slipstream_tf.scores.base import Score
from slipstream_tf.scores.threshold import find_threshold


@dataclasses.dataclass(frozen=True)
class LastLoss(Score):
    """Skips the examples whose remembered losses are lowest; they must come again.

    Examples need an id, int64 [batch] in features["id"]: `inputs.with_ids` adds it, readers have
    `ids=True`. Their losses come from models with `slip.keras.LossFeedback`.

    Attributes:
        max_skips: an example is trained again after so many skips, at most 127; 0: no limit.
        weigh_returns: whether an example that was skipped weighs 1 + its skips when it is trained
            again.
        memory: bytes of the losses, or a text such as "64MB"; 20 to 40 bytes an example. Where an
            epoch has more, those of a sample of its examples, the same in every epoch.
        saturated_share: share of the hot examples whose keys count as saturated, 0 to 1: only such
            examples are skipped. None: all hot keys do, however far they move.
        alpha: share of an example's lookups that must be saturated, above 0, at most 1.
    """

    max_skips: int = 3
    weigh_returns: bool = True
    memory: int | str = "64MiB"
    saturated_share: float | None = None
    alpha: float = 1.0
    needs_losses = True
    needs_ids = True
    share_finds_threshold = False

    def __post_init__(self) -> None:
        place = "LastLoss"
        require_integer("max_skips", self.max_skips, 0, 127, place)
        if not isinstance(self.weigh_returns, bool):
            raise invalid("weigh_returns", self.weigh_returns, place, "True or False")
        parse_bytes("memory", self.memory, place)
        if (share := self.saturated_share) is not None:
            share = require_number("saturated_share", share, 0.0, 1.0, place)
            object.__setattr__(self, "saturated_share", share)
        alpha = require_number("alpha", self.alpha, 0.0, 1.0, place, open_minimum=True)
        object.__setattr__(self, "alpha", alpha)

    @property
    def examples_return(self) -> bool:  # type: ignore[override]
        """See `Score`."""
        return self.max_skips > 0

    @property
    def probes_every(self) -> int:  # type: ignore[override]
        """See `Score`.

        An example's keys must have been saturated since its last visit, which an epoch's worth of
        probes would never let all of them be; and examples that return move their rows.
        """
        return 0 if self.examples_return else 100

    @property
    def weighs_examples(self) -> bool:  # type: ignore[override]
        """See `Score`."""
        return self.weigh_returns

    def key_share(self, share: float) -> float:
        """See `Score`."""
        return 1.0 if self.saturated_share is None else self.saturated_share

    def gives_key_share(self, is_share_given: bool) -> bool:
        """See `Score`."""
        return self.saturated_share is not None

    @property
    def loss_memory(self) -> dict[str, Any]:
        """See `Score`."""
        return {
            "loss_memory_bytes": parse_bytes("memory", self.memory),
            "max_skips": self.max_skips,
            "weigh_visits": self.weigh_returns,
        }

    def initial_state(self) -> dict[str, Any]:
        """Returns {"loss_threshold": bound of the remembered loss}."""
        return {"loss_threshold": None}

    def next_state(self, state: Mapping[str, Any], ended: Any) -> dict[str, Any]:
        """See `Score`."""
        found = find_threshold(ended.losses, ended.share).scaled(ended.scale)
        return {"loss_threshold": found.threshold}

    def rule(self, state: Mapping[str, Any], begins: Any) -> dict[str, Any]:
        """See `Score`."""
        bound = state["loss_threshold"]
        return {"mode": "remembered_loss", "threshold": 0.0 if bound is None else bound}
