"""How much to skip next: bounds the target share by the quality budget, and T by the guard.

In: a window's losses and what was skipped in it. Out: the share to find T for and a factor on T.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.config import LossGuard, MaxAucLoss, MaxLogLossIncrease
from slipstream_tf.ops.classifier import ClassifierCounts
from slipstream_tf.ops.loss_statistics import LossStatistics
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.saturation import guard
from slipstream_tf.saturation.quality_budget import (
    CurvePoint,
    cost_of_weight,
    plan_share,
    relative_value,
)
from slipstream_tf.saturation.settings import EngineSettings

# Factor between two windows' shares of withheld rows, which react to T in no known way.
_MOST_GROWTH = 2.0
# What is carried from window to window beside the curves and the guard's state.
_NUMBERS = ("share", "trained", "skipped", "skipped_effective")


@dataclasses.dataclass(frozen=True, eq=False)
class WindowWork:
    """What a window brought that guard and budget go by.

    Attributes:
        inputs: how many were classified, skipped, ...
        rows: what became of its gradient rows, per tracked table.
        losses: of its trained examples, before they were trained on.
    """

    inputs: ClassifierCounts
    rows: Sequence[UpdateCounts]
    losses: LossStatistics

    @property
    def rows_offered(self) -> int:
        """Gradient rows that came in."""
        return sum(rows.offered for rows in self.rows)

    @property
    def rows_masked(self) -> int:
        """Gradient rows that were thrown away."""
        return sum(rows.masked for rows in self.rows)


@dataclasses.dataclass(frozen=True)
class Steering:
    """What holds for the next window.

    Attributes:
        share: to find T for, 0 to 1: of the hot inputs.
        scale: factor on T.
        guard: what the guard found, in words; empty without one.
        budget: what the budget allows, in words; empty without one.
        predicted_cost: quality missing at the end by the budget's estimate, or None.
        value: what training on a skippable example was worth in the window that ends, in average
            examples (`quality_budget.relative_value`); 1 where no losses came in.
    """

    share: float
    scale: float = 1.0
    guard: str = ""
    budget: str = ""
    predicted_cost: float | None = None
    value: float = 1.0


class Steerer:
    """Carries the guard's and the budget's state from window to window."""

    def __init__(self, settings: EngineSettings):
        """Starts with the configured share.

        Args:
            settings: their target share and budgets.
        """
        self._settings = settings
        self._tolerance = settings.bound(LossGuard)
        self._bounds = [settings.bound(kind) for kind in (MaxAucLoss, MaxLogLossIncrease)]
        self._guard = guard.GuardState()
        self._share = settings.target_share
        self._auc: list[CurvePoint] = []
        self._log_loss: list[CurvePoint] = []
        self._trained = 0
        self._skipped = 0
        self._skipped_effective = 0.0

    def next(self, work: WindowWork, planned_inputs: int | None) -> Steering:
        """Decides how much to skip after the window that ends.

        Args:
            work: what it brought.
            planned_inputs: examples that training is offered in all, if that is known.
        """
        value = self._value(work.losses)
        self._account(work, value)
        steering = Steering(self._settings.target_share)
        if any(self._bounds) and self._settings.steers_share:
            steering = self._bound_share(work, planned_inputs, value)
        if self._tolerance is not None:
            moments = (work.losses.skippable, work.losses.others)
            observation = guard.Losses(
                *(guard.LossSummary(m.count, m.mean, m.std_error) for m in moments)
            )
            self._guard, verdict = guard.decide(self._guard, observation, self._tolerance.tolerance)
            steering = dataclasses.replace(
                steering, scale=self._guard.scale, guard=verdict.explanation
            )
        self._share = steering.share
        return dataclasses.replace(steering, value=value)

    def state(self) -> dict[str, Any]:
        """Returns what is carried from window to window, as JSON-serialisable values."""
        return {
            "guard": dataclasses.asdict(self._guard),
            "auc": [list(dataclasses.astuple(point)) for point in self._auc],
            "log_loss": [list(dataclasses.astuple(point)) for point in self._log_loss],
            **{name: getattr(self, f"_{name}") for name in _NUMBERS},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._guard = guard.GuardState.from_dict(state["guard"])
        self._auc = [CurvePoint(*point) for point in state["auc"]]
        self._log_loss = [CurvePoint(*point) for point in state["log_loss"]]
        for name in _NUMBERS:
            setattr(self, f"_{name}", state[name])

    def _account(self, work: WindowWork, value: float) -> None:
        losses = work.losses
        # Where nothing is kept of the skippable examples, the curve would be that of the hard ones.
        is_whole = work.inputs.examples_skipped == 0 or losses.skippable.count > 0
        if losses.mean_loss is not None and is_whole:
            # Sample weights of the user's own may be small.
            inputs = max(1, round(losses.weight))
            self._log_loss.append(CurvePoint(self._trained, inputs, losses.mean_loss))
            if losses.auc is not None:
                self._auc.append(CurvePoint(self._trained, inputs, losses.auc))
        seen, skipped = work.inputs.examples_seen, work.inputs.examples_skipped
        missing = skipped
        if work.rows_offered:
            # A masked row is taken to cost what its share of an example does.
            missing += round((seen - skipped) * work.rows_masked / work.rows_offered)
        self._trained += seen - missing
        self._skipped += missing
        self._skipped_effective += missing * value

    def _value(self, losses: LossStatistics) -> float:
        """Worth of a skipped input, in average inputs."""
        settings, kept, mean = self._settings, losses.skippable, losses.mean_squared_residual
        value = 1.0
        if kept.count and mean:
            value = relative_value(kept.squared_residuals / kept.count, kept.count, mean)
        if settings.keep > 0.0:
            value += cost_of_weight(1.0 / settings.keep)
        return value

    def _bound_share(self, work: WindowWork, planned_inputs: int | None, value: float) -> Steering:
        if planned_inputs is None:
            words = "Nothing is skipped: the planned steps are not known (Window(planned_steps=))."
            return Steering(0.0, budget=words)
        budgets = zip(self._bounds, (self._auc, self._log_loss), strict=True)
        inputs = (max(planned_inputs, 1), self._trained, self._skipped, self._skipped_effective)
        plans = [
            plan_share(curve, *inputs, value, self._settings.budget_share * bound.value)
            for bound, curve in budgets
            if bound is not None
        ]
        plan = min(plans, key=lambda plan: plan.share)
        return Steering(
            min(self._settings.target_share, self._target_for(plan.share, work)),
            budget=plan.reason,
            predicted_cost=plan.predicted_cost,
        )

    def _target_for(self, share: float, work: WindowWork) -> float:
        """The share of hot examples that makes `share` of all examples, or of the rows."""
        if share == 0.0:
            return 0.0
        inputs, seen = work.inputs, work.inputs.examples_seen
        if not self._settings.loses_gradients:
            hot = inputs.hot_examples / seen if seen else 0.0
            return min(share / hot, 1.0) if hot else 0.0
        masked = work.rows_masked / work.rows_offered if work.rows_offered else 0.0
        if self._settings.skips_by_keys and seen:
            masked += inputs.examples_skipped / seen
        if not masked:
            return min(_MOST_GROWTH * self._share, share) if self._share else share
        return min(self._share * min(share / masked, _MOST_GROWTH), 1.0)
