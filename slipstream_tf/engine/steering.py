"""Bounds the fraction of skipped examples or masked rows by `max_auc_loss`.

The inputs are the losses of the trained examples of a window and its counts of skipped examples and
masked rows. The output is the target fraction of hot examples, from which the engine computes the
threshold T of the next window.

Since there is no run without skipping for comparison, a model predicts the cost. AUC grows by b for
each e-fold of trained examples (a learning curve a + b * ln(n)). If the training on S of N examples
is missing at the end of a run, AUC is lower by b * ln(N / (N - S)). The value of a skippable
example, relative to an average example, is estimated from the errors of the model on such examples.

On shuffled data the bound held: the mean AUC loss of three seeds was at most 0.0008, with 0.001
allowed (benchmarks/results/mask_and_defer.md). Note: on a changing stream the bound failed: the
loss was 0.0020, with 0.0005 allowed (benchmarks/results/stream.md). The method makes these
assumptions:

- The curve continues as its later part did. Most curves flatten, so that the prediction is too
  high, which is safe. The assumption fails if the learning rate is about to fall: training then
  improves late, and lost examples are worth more.
- AUC is measured before training on an example, over *all* examples. Skippable examples that
  subsampling kept must count 1 / keep_rate times. Otherwise the curve bends where skipping begins,
  because easy examples are missing from it.
- A stream with changing difficulty moves the curve for reasons other than learning. Noise around
  the line widens the bound. A steady trend counts as learning, in either direction.
- From the second epoch on, the AUC of repeated examples rises faster than the AUC of held-out
  examples. The slope is then too steep and the fraction too small, which is safe. When the AUC is
  close to 1, the curve is flat and the bound is no longer safe. Note: `Steerer` does not detect
  this.
- Skipping examples costs as much as training on fewer examples. For examples skipped at random this
  is approximately true. In one epoch of globo clicks (2.7M examples, three seeds), skipping 21.7%
  and 40% of the examples lost as much AUC as a slope b of 0.033, 0.023 and 0.027 predicts (one
  value per seed, equal for both fractions). The fit over the whole curve returned 0.035, 0.020,
  0.022, and the fit over its first 35% 0.018, 0.030, 0.032. The loss was up to 1.3 times the loss
  that `LearningCurve.slope` predicts and 1.2 times the loss that `LearningCurve.bound` predicts. A
  learning curve is not exactly a line, and the standard error of a line does not include this
  deviation. `MODEL_MARGIN` covers it. (With a margin of 1.25 and `max_auc_loss=0.001`, 0.0011 AUC
  were lost on globo, seed 0.) Early bounds were less accurate (1.4 times, one seed of three). Later
  plans correct this error unless the allowed loss is already spent.
- Skipping only one kind of examples can also shift calibration, which a learning curve does not
  show.
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

MIN_POINTS = 5  # windows in the later part; fewer do not show their noise
LATER_PART = 0.25  # the later part of a curve begins at this fraction of its length
CONFIDENCE_Z = 1.6449  # one-sided 95%
MODEL_MARGIN = 1.5  # factor of the slope's bound; a curve is not exactly a line (see above)
MAX_MISSING = 0.9  # maximum missing fraction; the line is not valid for fewer examples
MIN_VALUE = 0.05  # in average examples; the estimate is too rough below
MIN_KEPT_INPUTS = 200  # with fewer, a skipped example counts as an average example
_LONGEST_MEMORY = 0.9  # maximum correlation of adjacent windows that is corrected
_ROUNDING_ERROR = 1e-12  # relative
# Maximum growth of the masked fraction from window to window, because its response to T is unknown.
_MAX_GROWTH = 2.0
# State of a `Steerer` in addition to the curve.
_NUMBERS = ("fraction", "trained", "skipped", "skipped_effective")


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """AUC of one window, in which examples are predicted before training.

    Attributes:
        trained: Number of examples trained before the window began.
        inputs: Number of examples of the window for which the AUC was measured, before training on
            them.
        auc: The AUC. Points that are not finite are ignored.
    """

    trained: int
    inputs: int
    auc: float


@dataclasses.dataclass(frozen=True)
class LearningCurve:
    """A line through the later part of a learning curve.

    The line is auc = a + b * ln(n), where n is the number of trained examples.

    Attributes:
        slope: b, the AUC gained per e-fold of trained examples.
        std_error: Standard error of the slope.
        bound: Upper bound of |b| with 95% confidence.
        points: Number of windows in the fit.
    """

    slope: float
    std_error: float
    bound: float
    points: int


@dataclasses.dataclass(frozen=True, eq=False)
class WindowWork:
    """Counts and losses of a window that determine the bound.

    Attributes:
        inputs: Counts of classified and skipped examples.
        rows: Counts of gradient rows, for each tracked table.
        losses: Losses of the trained examples, measured before training on them.
    """

    inputs: ClassifierCounts
    rows: Sequence[UpdateCounts]
    losses: LossStatistics

    @property
    def rows_offered(self) -> int:
        """Number of gradient rows."""
        return sum(rows.offered for rows in self.rows)

    @property
    def rows_masked(self) -> int:
        """Number of masked gradient rows."""
        return sum(rows.masked for rows in self.rows)


@dataclasses.dataclass(frozen=True)
class Steering:
    """The decision for the next window, and its reasons.

    Attributes:
        fraction: Fraction of the hot examples for which T is found, 0 to 1. A hot example has a
            finite skip score. 0 means that nothing is skipped.
        plan: A sentence about the savings that `max_auc_loss` allows. Empty without a bound.
        predicted_cost: Estimated AUC loss at the end of training, or None if unknown.
        value: Value of training on a skippable example in the window that ends, relative to an
            average example (`relative_value`). 1 if no losses were recorded.
    """

    fraction: float
    plan: str = ""
    predicted_cost: float | None = None
    value: float = 1.0


class Steerer:
    """Tracks the learning curve and the spent AUC across windows."""

    def __init__(self, settings: EngineSettings):
        """Starts with the target fraction of the settings.

        Args:
            settings: Settings of the engine.
        """
        self._settings = settings
        self._fraction = settings.target_fraction
        self._curve: list[CurvePoint] = []
        self._trained = 0
        self._skipped = 0
        self._skipped_effective = 0.0

    def next(self, work: WindowWork, planned_inputs: int | None) -> Steering:
        """Decides the fraction to skip in the next window.

        Args:
            work: Counts and losses of the window that ends.
            planned_inputs: Number of examples that training is offered in total, or None if
                unknown. With `max_auc_loss`, None means that nothing is skipped.

        Returns:
            The decision. Without `max_auc_loss`, it is the target fraction of the settings.
        """
        value = self._value(work.losses)
        self._account(work, value)
        steering = Steering(self._settings.target_fraction)
        if self._settings.max_auc_loss is not None and self._settings.steers_fraction:
            steering = self._bound_fraction(work, planned_inputs, value)
        self._fraction = steering.fraction
        return dataclasses.replace(steering, value=value)

    def state(self) -> dict[str, Any]:
        """Returns the state between windows as JSON-serializable values."""
        curve = [list(dataclasses.astuple(point)) for point in self._curve]
        return {"auc": curve, **{name: getattr(self, f"_{name}") for name in _NUMBERS}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned."""
        self._curve = [CurvePoint(*point) for point in state["auc"]]
        for name in _NUMBERS:
            setattr(self, f"_{name}", state[name])

    def _account(self, work: WindowWork, value: float) -> None:
        losses = work.losses
        # Without kept skippable examples, the AUC covers hard examples only and is not comparable.
        is_whole = work.inputs.examples_skipped == 0 or losses.skippable > 0
        if losses.auc is not None and is_whole:
            # Sample weights of the user may be small.
            inputs = max(1, round(losses.weight))
            self._curve.append(CurvePoint(self._trained, inputs, losses.auc))
        seen, skipped = work.inputs.examples_seen, work.inputs.examples_skipped
        missing = skipped
        if work.rows_offered:
            # A masked row is assumed to cost as much as its fraction of an example.
            missing += round((seen - skipped) * work.rows_masked / work.rows_offered)
        self._trained += seen - missing
        self._skipped += missing
        self._skipped_effective += missing * value

    def _value(self, losses: LossStatistics) -> float:
        """Returns the value of a skipped example, in average examples."""
        settings, kept, mean = self._settings, losses.skippable, losses.mean_squared_residual
        value = 1.0
        if kept and mean:
            value = relative_value(losses.skippable_squared_residuals / kept, kept, mean)
        if settings.examples.keep_rate > 0.0:
            value += cost_of_weight(1.0 / settings.examples.keep_rate)
        return value

    def _bound_fraction(
        self, work: WindowWork, planned_inputs: int | None, value: float
    ) -> Steering:
        if planned_inputs is None:
            words = (
                "The allowed fraction is 0 because the number of planned steps is unknown. Pass "
                "Window(planned_steps=...)."
            )
            return Steering(0.0, words)
        allowed = self._settings.max_auc_loss_each
        assert allowed is not None
        inputs = (max(planned_inputs, 1), self._trained, self._skipped, self._skipped_effective)
        plan = plan_fraction(self._curve, *inputs, value, allowed)
        fraction = min(self._settings.target_fraction, self._target_for(plan.fraction, work))
        return dataclasses.replace(plan, fraction=fraction)

    def _target_for(self, fraction: float, work: WindowWork) -> float:
        """Converts the fraction of all examples into the fraction of hot examples.

        If gradients are masked, `fraction` is a fraction of all gradient rows.
        """
        if fraction == 0.0:
            return 0.0
        inputs, seen = work.inputs, work.inputs.examples_seen
        if not self._settings.gradients.loses_gradients:
            hot = inputs.hot_examples / seen if seen else 0.0
            return min(fraction / hot, 1.0) if hot else 0.0
        masked = work.rows_masked / work.rows_offered if work.rows_offered else 0.0
        if self._settings.examples.steered_by and seen:
            masked += inputs.examples_skipped / seen
        if not masked:
            return min(_MAX_GROWTH * self._fraction, fraction) if self._fraction else fraction
        return min(self._fraction * min(fraction / masked, _MAX_GROWTH), 1.0)


def fit_learning_curve(curve: Sequence[CurvePoint]) -> LearningCurve | None:
    """Fits a line to the later part of a learning curve.

    The line auc = a + b * ln(n) is fitted by weighted least squares. n is the number of examples
    trained until the middle of a window. The weight is the number of examples of the window. If
    examples of little value are skipped, n grows more slowly than the knowledge of the model, so
    that the slope is slightly too steep, which is safe.

    The bound is |b| + t * standard error, where t is from Student's distribution, because there are
    few windows. The standard error follows from the scatter around the line. If adjacent windows
    have correlated errors (correlation r > 0), the number of independent windows is smaller,
    therefore the error is multiplied by sqrt((1 + r) / (1 - r)). In simulations with independent
    windows, the bound held for 95% of the curves from 5 windows in the fit. With r = 0.6 it held
    for 89% to 94% of the curves from 15 windows.

    If the AUC falls, early examples taught the model little about the end of the stream. Such a
    curve does not show how much late examples matter, therefore the method uses |b|.

    Args:
        curve: One point per window.

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
    if spread <= _ROUNDING_ERROR:  # all windows have the same n
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
    """Returns the value of training on a skipped example, in average examples.

    The value is the ratio of mean squared residuals, (label - prediction)**2, because examples that
    the model predicts well teach it little. label - prediction is the gradient with respect to the
    logit. It scales the gradients of all rows and weights of the example. The skippable examples
    that subsampling kept represent the skipped examples.

    Note: the ratio is a proxy and was not compared with the measured cost of skipping. Examples can
    be well predicted because they are trained on. If few examples are kept, a rare confident error
    is missed. Therefore the value is at least `MIN_VALUE`, and at least 1 if fewer than
    `MIN_KEPT_INPUTS` examples were kept. A ratio above 1 is used unchanged.

    Args:
        kept_mean: Mean squared residual of the kept skippable examples.
        kept_inputs: Number of these examples.
        all_mean: Mean squared residual of all examples, where a kept example counts 1 / keep_rate
            times.

    Returns:
        The value, at least `MIN_VALUE`. If the means are unknown, 1.
    """
    is_known = math.isfinite(kept_mean) and math.isfinite(all_mean) and all_mean > 0.0
    ratio = kept_mean / all_mean if is_known else 1.0
    if kept_inputs < MIN_KEPT_INPUTS:
        return max(ratio, 1.0)
    return max(ratio, MIN_VALUE)


def cost_of_weight(weight: float) -> float:
    """Returns the additional cost of a skipped example due to large weights.

    The cost is in average examples. An example with weight `weight` has a gradient that is `weight`
    times as large. An adaptive update rule (Adagrad, Adam) treats it as noise. In one epoch of
    globo clicks with 3.5% of the examples skipped (rows with Adagrad, one seed each), weights of 2,
    4 and 10 cost 0.5, 1.3 and 2.3 average examples per skipped example more than random skipping.
    The formula ln(weight) returns 0.7, 1.4 and 2.3.

    Args:
        weight: 1 / keep_rate, at least 1.
    """
    return math.log(weight)


def plan_fraction(
    curve: Sequence[CurvePoint],
    planned_inputs: int,
    trained: int,
    skipped: int,
    skipped_effective: float,
    value: float,
    max_auc_loss: float,
) -> Steering:
    """Finds the fraction of examples to skip within an AUC bound.

    Each skipped example counts with its value relative to an average example (`relative_value`). S
    is the maximum sum of these values in the whole training. N is the larger of `planned_inputs`
    and `trained` plus `skipped`. S solves b * ln(N / (N - S)) = `max_auc_loss`, therefore S = N *
    (1 - exp(-max_auc_loss / b)), at most `MAX_MISSING` * N. The slope b is `LearningCurve.bound`
    times `MODEL_MARGIN`. The part of S that earlier windows did not use is spread evenly over the
    remaining examples.

    Call this function at the end of each window. The new plan uses the latest slope and value, and
    it corrects for earlier windows that skipped too many or too few examples.

    Args:
        curve: Progressive AUC so far. The module docstring states which examples it must cover.
        planned_inputs: Number of examples that training is offered from start to end, in all
            epochs.
        trained: Number of examples trained so far.
        skipped: Number of examples skipped so far.
        skipped_effective: Sum of the values of these examples, each estimated when it was skipped.
        value: Value of the examples to be skipped next, from `relative_value`, above 0.
        max_auc_loss: Maximum AUC loss of skipping in total, above 0.

    Returns:
        The plan. Note: its `fraction` is a fraction of all remaining examples, not of the hot
        examples as in other `Steering` objects. It is 0 with too few windows to fit a slope.
    """
    fit = fit_learning_curve(curve)
    if fit is None:
        words = (
            "The allowed fraction is 0 because the later part of the learning curve has fewer than "
            f"{MIN_POINTS} windows."
        )
        return Steering(0.0, words)

    # Training may last longer than planned.
    total = max(planned_inputs, trained + skipped)
    left = total - trained - skipped
    slope = MODEL_MARGIN * fit.bound
    may_miss = -math.expm1(-max_auc_loss / slope) if slope else 1.0
    spare = total * min(may_miss, MAX_MISSING) - skipped_effective
    fraction = min(max(spare / (value * left), 0.0), 1.0) if left else 0.0
    cost = cost_of_missing(slope, total, skipped_effective + fraction * value * left)
    words = (
        f"The AUC rises by {fit.slope:.3g} +- {fit.std_error:.2g} per e-fold of examples "
        f"({fit.points} windows); the plan assumes {slope:.3g}. A skipped example has the value "
        f"{value:.2f}. "
    )
    if not left:
        words += "No planned examples remain."
    elif spare <= 0.0:
        words += f"The allowed AUC loss of {max_auc_loss:g} is used up."
    elif fraction == 1.0:
        words += (
            f"The allowed AUC loss of {max_auc_loss:g} does not limit the fraction of the policy."
        )
    else:
        words += f"The allowed AUC loss of {max_auc_loss:g} is distributed over {left} examples."
    return Steering(fraction, words, cost)


def cost_of_missing(slope: float, total: int, missing: float) -> float:
    """Returns the AUC loss at the end of training.

    Args:
        slope: Slope of the learning curve, per e-fold of examples.
        total: Number of examples that training is offered.
        missing: Number of missing examples, weighted by their value.

    Returns:
        The loss, or infinity if all examples are missing.
    """
    if slope == 0.0:
        return 0.0
    return -slope * math.log1p(-missing / total) if missing < total else math.inf


def _correlation_of_neighbours(residual: np.ndarray) -> float:
    """Returns the correlation of adjacent residuals, 0 to `_LONGEST_MEMORY`.

    The residuals of a fitted line underestimate the correlation by about (1 + 4r) / n, which is
    added.
    """
    power = float(residual @ residual)
    if power == 0.0:
        return 0.0
    found = float(residual[1:] @ residual[:-1]) / power
    found += (1.0 + 4.0 * found) / residual.size
    return min(max(found, 0.0), _LONGEST_MEMORY)


def _student_t(freedom: int) -> float:
    """Returns the 95% quantile of Student's t with `freedom` degrees of freedom.

    The error is at most 0.5% from 3 degrees of freedom on. The method is the Cornish-Fisher
    expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    z = CONFIDENCE_Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
