"""How much to save next: bounds the share of skipped examples or masked rows by `max_auc_loss`.

In: the losses of a window's trained examples, and its counts of skipped examples and masked rows.
Out: the share that T is found for.

There is no run without skipping to compare with, so a model predicts the cost. AUC grows by b for
each e-fold of trained examples (a learning curve a + b * ln(n)). A run that ends with S of its N
examples' worth of training missing ends b * ln(N / (N - S)) short. The worth of a skippable
example, in average examples, follows from the model's errors on such examples.

The bound held on shuffled data: the mean AUC loss of three seeds was at most 0.0008 where 0.001 was
allowed (benchmarks/results/withholding.md). It failed on a changing stream: 0.0020 were lost where
0.0005 were allowed (benchmarks/results/stream.md). It rests on these assumptions:

- The curve continues as its later part did. It mostly flattens, so that the prediction is too high,
  which is safe. The assumption fails where the learning rate is about to fall: training then gains
  late, and lost examples count for more.
- AUC is measured before training on an example, over *all* examples: skippable examples that
  thinning kept must count 1 / keep_rate times. Without them the curve bends where skipping begins,
  because the easy examples leave it.
- A stream whose difficulty changes moves the curve for reasons other than learning. Noise around
  the line widens the bound. A steady trend counts as learning, in either direction.
- From the second epoch on, the AUC of repeated examples rises faster than the AUC of held-out
  examples. The slope is then too steep and the share too small, which is safe. That ends when the
  AUC comes near 1, where no slope is left; end the curve before.
- Missing examples cost as much as fewer examples. For examples skipped at random that holds
  roughly. One epoch of globo clicks (2.7M examples), three seeds: 21.7% and 40% of the examples
  skipped cost AUC at b = 0.033, 0.023, 0.027 (both shares agree). The fit over the whole curve gave
  0.035, 0.020, 0.022, and from the first 35% of it 0.018, 0.030, 0.032. The cost was up to 1.3
  times the cost by the fit and 1.2 times the cost by its bound, because scatter around a line does
  not show that curves are no lines. Hence `MODEL_MARGIN` (with 1.25, a bound of 0.001 AUC cost
  0.0011 on globo, seed 0). Early bounds were further off (1.4 times, one seed of three). Later
  plans correct that as far as the allowed loss is not spent.
- Skipping one kind of examples only can also shift calibration, which no learning curve shows.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.ops.classifier import ClassifierCounts
from slipstream_tf.ops.loss_statistics import LossStatistics
from slipstream_tf.ops.update_policy import UpdateCounts

MIN_POINTS = 5  # windows in the later part; fewer say too little about their own noise
LATER_PART = 0.25  # the later part of a curve: from this share of its length on
CONFIDENCE_Z = 1.6449  # one-sided 95%
MODEL_MARGIN = 1.5  # on the bound of the slope, because a curve is no line (see above)
MOST_MISSING = 0.9  # of all examples' worth, however flat the curve: no line reaches further down
MIN_VALUE = 0.05  # of an average example; the estimate is too rough for less
MIN_KEPT_INPUTS = 200  # below, a skipped example counts as an average example
_LONGEST_MEMORY = 0.9  # highest correlation of neighbouring windows that is corrected for
_ROUNDING_ERROR = 1e-12  # relative
# Factor between two windows' shares of masked rows, which react to T in no known way.
_MOST_GROWTH = 2.0
# Numbers that a `Steerer` carries from window to window in addition to the curve.
_NUMBERS = ("share", "trained", "skipped", "skipped_effective")


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Progressive AUC in one window.

    Attributes:
        trained: examples trained before the window began.
        inputs: examples of the window that the AUC was measured on, before training on them.
        auc: the AUC; a point that is not finite is left out.
    """

    trained: int
    inputs: int
    auc: float


@dataclasses.dataclass(frozen=True)
class LearningCurve:
    """The line a + b * ln(n) through the later part of a curve.

    Attributes:
        slope: b, per e-fold of trained examples.
        std_error: of the slope.
        bound: |b| is at most this with 95% confidence.
        points: windows in the fit.
    """

    slope: float
    std_error: float
    bound: float
    points: int


@dataclasses.dataclass(frozen=True, eq=False)
class WindowWork:
    """The work of a window that the bound depends on.

    Attributes:
        inputs: how many examples were classified, skipped, ...
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
        """Gradient rows that were masked."""
        return sum(rows.masked for rows in self.rows)


@dataclasses.dataclass(frozen=True)
class Steering:
    """The share to save on in the next window.

    Attributes:
        share: of the hot examples, to find T for, 0 to 1.
        plan: what `max_auc_loss` allows, as a sentence; empty without a bound.
        predicted_cost: AUC missing at the end of training by the estimate; None: not known.
        value: what training on a skippable example was worth in the window that ends, in average
            examples (`relative_value`); 1 where no losses came in.
    """

    share: float
    plan: str = ""
    predicted_cost: float | None = None
    value: float = 1.0


class Steerer:
    """Carries the learning curve and the spent part of the bound from window to window."""

    def __init__(self, settings: EngineSettings):
        """Starts with the configured share.

        Args:
            settings: their target share and `max_auc_loss`.
        """
        self._settings = settings
        self._share = settings.target_share
        self._curve: list[CurvePoint] = []
        self._trained = 0
        self._skipped = 0
        self._skipped_effective = 0.0

    def next(self, work: WindowWork, planned_inputs: int | None) -> Steering:
        """Decides how much to save after the window that ends.

        Args:
            work: of that window.
            planned_inputs: examples that training is offered in all; None: not known.
        """
        value = self._value(work.losses)
        self._account(work, value)
        steering = Steering(self._settings.target_share)
        if self._settings.max_auc_loss is not None and self._settings.steers_share:
            steering = self._bound_share(work, planned_inputs, value)
        self._share = steering.share
        return dataclasses.replace(steering, value=value)

    def state(self) -> dict[str, Any]:
        """Returns the state between windows as JSON-serializable values."""
        curve = [list(dataclasses.astuple(point)) for point in self._curve]
        return {"auc": curve, **{name: getattr(self, f"_{name}") for name in _NUMBERS}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned."""
        self._curve = [CurvePoint(*point) for point in state["auc"]]
        for name in _NUMBERS:
            setattr(self, f"_{name}", state[name])

    def _account(self, work: WindowWork, value: float) -> None:
        losses = work.losses
        # If no skippable example is kept, the AUC would be measured on hard examples only.
        is_whole = work.inputs.examples_skipped == 0 or losses.skippable > 0
        if losses.auc is not None and is_whole:
            # The user's own sample weights may be small.
            inputs = max(1, round(losses.weight))
            self._curve.append(CurvePoint(self._trained, inputs, losses.auc))
        seen, skipped = work.inputs.examples_seen, work.inputs.examples_skipped
        missing = skipped
        if work.rows_offered:
            # A masked row is assumed to cost as much as its share of an example.
            missing += round((seen - skipped) * work.rows_masked / work.rows_offered)
        self._trained += seen - missing
        self._skipped += missing
        self._skipped_effective += missing * value

    def _value(self, losses: LossStatistics) -> float:
        """Worth of a skipped example, in average examples."""
        settings, kept, mean = self._settings, losses.skippable, losses.mean_squared_residual
        value = 1.0
        if kept and mean:
            value = relative_value(losses.skippable_squared_residuals / kept, kept, mean)
        if settings.examples.keep > 0.0:
            value += cost_of_weight(1.0 / settings.examples.keep)
        return value

    def _bound_share(self, work: WindowWork, planned_inputs: int | None, value: float) -> Steering:
        if planned_inputs is None:
            words = "Nothing is skipped: the planned steps are not known (Window(planned_steps=))."
            return Steering(0.0, words)
        allowed = self._settings.max_auc_loss_each
        assert allowed is not None
        inputs = (max(planned_inputs, 1), self._trained, self._skipped, self._skipped_effective)
        plan = plan_share(self._curve, *inputs, value, allowed)
        share = min(self._settings.target_share, self._target_for(plan.share, work))
        return dataclasses.replace(plan, share=share)

    def _target_for(self, share: float, work: WindowWork) -> float:
        """The share of hot examples that makes `share` of all examples, or of the rows."""
        if share == 0.0:
            return 0.0
        inputs, seen = work.inputs, work.inputs.examples_seen
        if not self._settings.gradients.loses_gradients:
            hot = inputs.hot_examples / seen if seen else 0.0
            return min(share / hot, 1.0) if hot else 0.0
        masked = work.rows_masked / work.rows_offered if work.rows_offered else 0.0
        if self._settings.examples.steered_by and seen:
            masked += inputs.examples_skipped / seen
        if not masked:
            return min(_MOST_GROWTH * self._share, share) if self._share else share
        return min(self._share * min(share / masked, _MOST_GROWTH), 1.0)


def fit_learning_curve(curve: Sequence[CurvePoint]) -> LearningCurve | None:
    """Fits auc = a + b * ln(n) to the later part of a curve, by weighted least squares.

    n is the number of examples trained by the middle of a window, the weight its number of inputs.
    Where examples of little value are skipped, n grows slower than what was learned, so the slope
    comes out a little too steep: safe.
    The bound is |b| + t * standard error, with Student's t for the few windows there are. The
    error comes from the scatter around the line; if neighbouring windows err alike (correlation r
    > 0), there are fewer independent ones, and it is widened by sqrt((1 + r) / (1 - r)). In
    simulations the bound held in 95% of the curves with independent windows, from 5 windows in
    the fit on, and in 89% to 94% with r = 0.6, from 15 windows on.

    A falling AUC has a slope, too: early examples taught little about the end of the stream. The
    curve does not show how much late examples matter; at least as much is assumed.

    Args:
        curve: one point per window.

    Returns:
        The line, or None if the later part has fewer than `MIN_POINTS` windows.
    """
    known = [point for point in curve if math.isfinite(point.auc)]
    end = max((point.trained + point.inputs for point in known), default=0)
    later = [point for point in known if point.trained >= LATER_PART * end]
    later.sort(key=lambda point: point.trained)
    if len(later) < MIN_POINTS:
        return None
    x = np.log([point.trained + point.inputs / 2 for point in later])
    y = np.array([point.auc for point in later], np.float64)
    weight = np.array([point.inputs for point in later], np.float64)
    weight /= weight.sum()
    x -= weight @ x
    y -= weight @ y
    spread = float(weight @ x**2)
    if spread <= _ROUNDING_ERROR:  # all windows at the same number of examples
        return None
    slope = float(weight @ (x * y)) / spread
    residual = np.sqrt(weight) * (y - slope * x)
    freedom = len(later) - 2
    error = math.sqrt(float(residual @ residual) / freedom / spread)
    memory = _correlation_of_neighbours(residual)
    error *= math.sqrt((1.0 + memory) / (1.0 - memory))
    bound = abs(slope) + _student_t(freedom) * error
    return LearningCurve(slope, error, bound, len(later))


def relative_value(kept_mean: float, kept_inputs: int, all_mean: float) -> float:
    """What training on a skipped example is worth, in average inputs.

    That is the ratio of mean squared residuals, (label - prediction)**2: what the model already
    predicts well teaches it little. label - prediction is the gradient with respect to the logit;
    it scales the gradients of all rows and weights that the example touches. The skippable examples
    that thinning kept stand for the skipped ones.

    It is a proxy: examples can be well predicted because they are trained on, and a rare, confident
    error is missed where few examples are kept. It was not measured against what skipping such
    examples costs. Hence `MIN_VALUE`, and no value below that of an
    average input where fewer than `MIN_KEPT_INPUTS` were kept. Above 1 it is believed.

    Args:
        kept_mean: mean squared residual of the kept skippable inputs.
        kept_inputs: how many they were.
        all_mean: the same mean over all examples, the kept ones counted 1 / keep_rate times.

    Returns:
        The value, at least `MIN_VALUE`; 1 if nothing is known.
    """
    is_known = math.isfinite(kept_mean) and math.isfinite(all_mean) and all_mean > 0.0
    ratio = kept_mean / all_mean if is_known else 1.0
    if kept_inputs < MIN_KEPT_INPUTS:
        return max(ratio, 1.0)
    return max(ratio, MIN_VALUE)


def cost_of_weight(weight: float) -> float:
    """What a skipped example costs beside its own worth, in average ones, if kept ones carry it.

    An example that stands for `weight` of them makes a gradient as large, which an update rule that
    adapts to gradients (Adagrad, Adam) takes for noise. One epoch of globo clicks with 3.5% of the
    examples skipped, rows by Adagrad, one seed each: weights of 2, 4 and 10 cost 0.5, 1.3 and 2.3
    average examples per skipped one beyond what skipping as many at random costs; ln(weight) is
    0.7, 1.4 and 2.3.

    Args:
        weight: 1 / keep_rate, at least 1.
    """
    return math.log(weight)


def plan_share(
    curve: Sequence[CurvePoint],
    planned_inputs: int,
    trained: int,
    skipped: int,
    skipped_effective: float,
    value: float,
    max_auc_loss: float,
) -> Steering:
    """Finds the share of the next examples to skip within a bound of the AUC loss.

    S effective examples of N planned examples may be missing at the end where b * ln(N / (N - S))
    equals the bound: S = N * (1 - exp(-max_auc_loss / b)), and at most `MOST_MISSING`. Here b is
    the bound of the fit times `MODEL_MARGIN`. The rest of S is spread evenly over the examples
    still to come. Call it at each window's end: the bound of the slope gets tighter, the value
    changes, and the plan makes up for examples that were skipped beyond or short of it.

    Args:
        curve: progressive AUC so far; see the module's docstring for what it must cover.
        planned_inputs: examples that training is offered from start to end, all epochs.
        trained: examples trained so far.
        skipped: examples skipped so far.
        skipped_effective: the same, each counted with its value when it was skipped.
        value: of the examples to be skipped next, by `relative_value`; above 0.
        max_auc_loss: maximum AUC that skipping may cost in all, above 0.

    Returns:
        The share of all examples, not only of the hot examples, and the plan. With too few windows
        for a slope, the share is 0.
    """
    fit = fit_learning_curve(curve)
    if fit is None:
        words = f"Nothing is skipped: the curve's later part has fewer than {MIN_POINTS} windows."
        return Steering(0.0, words)

    # A plan that was too short is as long as training turned out to be.
    total = max(planned_inputs, trained + skipped)
    left = total - trained - skipped
    slope = MODEL_MARGIN * fit.bound
    may_miss = -math.expm1(-max_auc_loss / slope) if slope else 1.0
    spare = total * min(may_miss, MOST_MISSING) - skipped_effective
    share = min(max(spare / (value * left), 0.0), 1.0) if left else 0.0
    cost = cost_of_missing(slope, total, skipped_effective + share * value * left)
    words = (
        f"Slope {fit.slope:.3g} +- {fit.std_error:.2g} per e-fold of examples ({fit.points} "
        f"windows), assumed {slope:.3g}; a skipped example is worth {value:.2f}. "
    )
    if not left:
        words += "No planned examples are left."
    elif spare <= 0.0:
        words += f"The allowed AUC loss of {max_auc_loss:g} is used up."
    elif share == 1.0:
        words += f"The allowed AUC loss of {max_auc_loss:g} allows more than the policy's share."
    else:
        words += f"The allowed AUC loss of {max_auc_loss:g} is spread over {left} examples."
    return Steering(share, words, cost)


def cost_of_missing(slope: float, total: int, missing: float) -> float:
    """AUC missing at the end of training by the curve; infinite if everything is missing.

    Args:
        slope: of the learning curve, per e-fold of inputs.
        total: examples that training is offered.
        missing: of these, counted with their worth.
    """
    if slope == 0.0:
        return 0.0
    return -slope * math.log1p(-missing / total) if missing < total else math.inf


def _correlation_of_neighbours(residual: np.ndarray) -> float:
    """Correlation of each residual with the next, 0 to `_LONGEST_MEMORY`.

    Raised by about as much as residuals of a fitted line fall short of it: (1 + 4r) / n.
    """
    power = float(residual @ residual)
    if power == 0.0:
        return 0.0
    found = float(residual[1:] @ residual[:-1]) / power
    found += (1.0 + 4.0 * found) / residual.size
    return min(max(found, 0.0), _LONGEST_MEMORY)


def _student_t(freedom: int) -> float:
    """The 95% quantile of Student's t, within 0.5% from 3 degrees of freedom on.

    Cornish-Fisher expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    z = CONFIDENCE_Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
