"""An example is likely left out if a pilot foresees a low loss; what is kept stands for the rest.

For a single pass: the loss is foreseen before the model sees the example. Methods: local
case-control sampling (Fithian & Hastie, Annals of Statistics 2014) and nonuniform negative sampling
with log-odds correction (Wang, Zhang & Wang, NeurIPS 2021).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream_tf._utils.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf.config import parse_bytes
from slipstream_tf.policies.skip_examples import Score
from slipstream_tf.policies.threshold import find_thinning, value_of_thinned

_PILOTS = ("label", "linear", "fm", "model")
_CORRECTIONS = ("weight", "offset")
# Default floor, of the share that is kept. On globo a quarter of it did as well; its weights are up
# to four times as large.
_FLOOR = 0.4


@dataclasses.dataclass(frozen=True)
class ForeseenLoss(Score):
    """Keeps an example with a probability that grows with |label - what a pilot predicted|.

    Labels are 0 to 1, e.g. clicks; of several, the largest counts. What is kept is corrected, so
    that training aims at what it would on all examples. The pilot learns along from what is kept,
    from the first step on.

    Attributes:
        pilot: what predicts: "fm", a factorisation machine of the keys; "linear", a logistic
            regression of the keys; "label", the base rate, which makes this uniform negative
            sampling; "model", the model's own forward pass, which is paid for every example
            (`slip.keras.Model`).
        correct: "weight": an example weighs 1 / its probability, as its sample weight; or "offset":
            the log of (probability with label 1 / with label 0) is added to the log-odds that the
            model predicts, in training only (`slip.models` or a `slip.keras.Model` of one output,
            with binary cross-entropy and labels of 0 and 1).
        floor: least probability to be kept, above 0, below 1: what is foreseen wrongly comes in
            with a weight of 1 / floor at most. None: 0.4 of the share that is kept.
        factors: of "fm": numbers of a key's factor, 1 to 8.
        memory: bytes of what "linear" and "fm" learn, or a text such as "32MiB": part of
            `HotSet.memory`. Keys have buckets of 64 bytes, 32 with up to 4 factors, 16 of "linear";
            where there are more keys than buckets, some share one.
    """

    pilot: str = "fm"
    correct: str = "weight"
    floor: float | None = None
    factors: int = 8
    memory: int | str = "32MiB"
    default_share = 0.5
    steered_by = ""
    probes_every = None

    def __post_init__(self) -> None:
        place = "ForeseenLoss"
        require_choice("pilot", self.pilot, _PILOTS, place)
        require_choice("correct", self.correct, _CORRECTIONS, place)
        if self.floor is not None:
            floor = require_number("floor", self.floor, 0.0, 1.0, place, open_minimum=True)
            if floor == 1.0:
                raise invalid("floor", 1.0, place, "below 1")
            object.__setattr__(self, "floor", floor)
        require_integer("factors", self.factors, 1, 8, place)
        parse_bytes("memory", self.memory, place, minimum=1024)

    def require_share(self, share: float, keep: float) -> None:
        place = "SkipExamples by ForeseenLoss"
        if keep:
            allowed = "0: ForeseenLoss keeps examples by its floor"
            raise invalid("keep", keep, place, allowed)
        if share == 1.0:
            raise invalid("share", share, place, "below 1")
        kept = round(1.0 - share, 12)
        if self.floor is not None and self.floor > kept:
            allowed = f"at most {kept:g}, the share that is kept"
            raise invalid("floor", self.floor, place, allowed)

    def key_share(self, share: float) -> float | None:
        return None

    @property
    def pilot_settings(self) -> dict[str, Any]:
        has_keys = self.pilot in ("linear", "fm")
        return {
            "pilot": self.pilot,
            "pilot_factors": self.factors,
            "pilot_memory_bytes": parse_bytes("memory", self.memory) if has_keys else 0,
        }

    def initial_state(self) -> dict[str, Any]:
        """Returns {"foreseen_threshold": the score from which on all are kept, "floor": ...}."""
        return {"foreseen_threshold": None, "floor": self.floor}

    def next_state(self, state: Mapping[str, Any], losses: Any, share: float) -> dict[str, Any]:
        kept = 1.0 - share
        floor = _FLOOR * kept if self.floor is None else self.floor
        return {"foreseen_threshold": find_thinning(losses, kept, floor), "floor": floor}

    def value_of_skipped(self, state: Mapping[str, Any], losses: Any) -> float | None:
        if state["foreseen_threshold"] is None:
            return None
        return value_of_thinned(losses, state["foreseen_threshold"], state["floor"])

    def rule(self, state: Mapping[str, Any], begins: Any) -> dict[str, Any]:
        if state["foreseen_threshold"] is None:
            return {"mode": "none"}
        return {
            "mode": "foreseen_loss",
            "threshold": state["foreseen_threshold"],
            "keep_rate": state["floor"],
        }
