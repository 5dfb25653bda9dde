"""Skips examples by the loss that a pilot model predicts.

Intended for a single pass over the data, because the loss is predicted before the model sees the
example. Methods: local case-control sampling (Fithian & Hastie, Annals of Statistics 2014) and
nonuniform negative sampling with log-odds correction (Wang, Zhang & Wang, NeurIPS 2021).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream_tf._utils.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf.config import parse_bytes
from slipstream_tf.policies.skip_examples import Score
from slipstream_tf.policies.threshold import find_subsampling_threshold, value_of_dropped

_PILOTS = ("label", "linear", "fm", "model")
_CORRECTIONS = ("weight", "offset")
# Default minimum keep probability as a multiple of the kept fraction. On globo (news clicks) a
# factor four times lower reached the same AUC, but its weights are up to four times as large.
_MIN_KEEP_FACTOR = 0.4


@dataclasses.dataclass(frozen=True)
class PredictedLoss(Score):
    """Scores examples by the loss that a small pilot model predicts.

    Before the model sees a batch, the pilot predicts each label. The score is |label - prediction|.
    An example is kept with a probability proportional to its score, between `min_keep_probability`
    and 1. Easy examples, for example most negatives of a click log, are therefore dropped most
    often. Kept examples are corrected by a weight or a logit offset, so that training aims at the
    same solution as on the full data. The pilot trains on the kept examples from the first step.

    Labels must be in [0, 1], for example clicks. If an example has multiple labels, the largest
    label counts.

    Example:

    >>> policy = slip.SkipExamples(slip.PredictedLoss(pilot="linear"), fraction=0.8)
    >>> policy.score.pilot
    'linear'
    >>> policy.fraction
    0.8

    Args:
        pilot: The pilot model. "fm": a factorization machine over the keys. "linear": logistic
            regression over the keys. "label": the base rate, which is uniform negative sampling.
            "model": the forward pass of the trained model (`slip.keras.Model`), which is computed
            for every example.
        correction: "weight" multiplies the sample weight by 1 / keep probability. "offset" adds
            log(keep probability with label 1 / keep probability with label 0) to the predicted
            log-odds during training. "offset" requires `slip.models` or a `slip.keras.Model` with
            one output, binary cross-entropy, and labels of 0 and 1.
        min_keep_probability: Minimum keep probability, in (0, 1). It bounds the weights by 1 /
            min_keep_probability, so that an example with a badly predicted loss cannot dominate a
            batch. Defaults to 0.4 times the kept fraction, 1 - `SkipExamples.fraction`.
        factors: Number of values per factor vector of "fm", 1 to 8.
        memory: Memory for the parameters of "linear" and "fm", in bytes or as text such as "32MiB".
            It is part of `HotSet.memory`. A key uses a bucket of 64 bytes ("fm"), 32 bytes ("fm"
            with up to 4 factors) or 16 bytes ("linear"). If there are more keys than buckets, some
            keys share a bucket.
    """

    pilot: str = "fm"
    correction: str = "weight"
    min_keep_probability: float | None = None
    factors: int = 8
    memory: int | str = "32MiB"
    default_fraction = 0.5
    steered_by = ""
    revisit_every = None

    def __post_init__(self) -> None:
        place = "PredictedLoss"
        require_choice("pilot", self.pilot, _PILOTS, place)
        require_choice("correction", self.correction, _CORRECTIONS, place)
        if self.min_keep_probability is not None:
            floor = require_number(
                "min_keep_probability",
                self.min_keep_probability,
                0.0,
                1.0,
                place,
                open_minimum=True,
            )
            if floor == 1.0:
                raise invalid("min_keep_probability", 1.0, place, "a number > 0 and < 1")
            object.__setattr__(self, "min_keep_probability", floor)
        require_integer("factors", self.factors, 1, 8, place)
        parse_bytes("memory", self.memory, place, minimum=1024)

    def require_fraction(self, fraction: float, keep_rate: float) -> None:
        place = "SkipExamples by PredictedLoss"
        if keep_rate:
            allowed = "0, because PredictedLoss has a `min_keep_probability` instead"
            raise invalid("keep_rate", keep_rate, place, allowed)
        if fraction == 1.0:
            raise invalid("fraction", fraction, place, "a number > 0 and < 1")
        kept = round(1.0 - fraction, 12)
        if self.min_keep_probability is not None and self.min_keep_probability > kept:
            allowed = f"at most {kept:g}, which is 1 - `SkipExamples.fraction`"
            raise invalid("min_keep_probability", self.min_keep_probability, place, allowed)

    def key_fraction(self, fraction: float) -> float | None:
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
        """Returns the state of the first window, which drops nothing."""
        return {"predicted_loss_threshold": None, "min_keep_probability": self.min_keep_probability}

    def next_state(self, state: Mapping[str, Any], losses: Any, fraction: float) -> dict[str, Any]:
        kept = 1.0 - fraction
        floor = (
            _MIN_KEEP_FACTOR * kept
            if self.min_keep_probability is None
            else self.min_keep_probability
        )
        return {
            "predicted_loss_threshold": find_subsampling_threshold(losses, kept, floor),
            "min_keep_probability": floor,
        }

    def value_of_skipped(self, state: Mapping[str, Any], losses: Any) -> float | None:
        if state["predicted_loss_threshold"] is None:
            return None
        return value_of_dropped(
            losses, state["predicted_loss_threshold"], state["min_keep_probability"]
        )

    def classifier_settings(self, state: Mapping[str, Any], start: Any) -> dict[str, Any]:
        if state["predicted_loss_threshold"] is None:
            return {"mode": "none"}
        return {
            "mode": "predicted_loss",
            "threshold": state["predicted_loss_threshold"],
            "keep_rate": state["min_keep_probability"],
        }
