"""How much may be skipped so that quality falls by at most a given amount. Pure.

In: the progressive quality of training so far, and what was skipped. Out: the share to skip next.

There is no run without skipping to compare with, so the cost is predicted by a model:
quality grows by b for each e-fold of trained examples (a learning curve a + b * ln(n)), so a run
that ends with S of its N inputs' worth of training missing ends b * ln(N / (N - S)) short. What a
skipped input is worth, in average examples, is judged by how wrong the model is on such inputs.

What that rests on, and when it fails:
- The curve goes on as its later part did. It mostly flattens, which errs on the safe side. It
  fails where the learning rate is about to fall: training then gains late, and lost examples count
  for more.
- Quality is measured before training on an example, over *all* examples: skippable ones that
  thinning kept must count 1 / keep_rate times. Without them the curve bends where skipping begins,
  as the easy examples leave it.
- A stream whose difficulty changes moves the curve for reasons other than learning. Noise around
  the line widens the bound; a steady trend is taken for learning, in either direction.
- From the second epoch on, examples were seen before, and their quality rises faster than that of
  held-out examples, as they are also learned by heart. The slope is then too steep and the share
  too
  small: safe. That ends when quality comes near its limit (an AUC of 1), where no slope is left;
  end the curve before.
- Missing examples cost what fewer examples cost. For examples skipped at random that holds roughly.
  One epoch of globo clicks (2.7M examples), three seeds: 21.7% and 40% of the examples skipped cost
  AUC at b = 0.033, 0.023, 0.027 (both shares agree); the fit over the whole curve gave 0.035,
  0.020, 0.022, and from the first 35% of it 0.018, 0.030, 0.032. In log loss b = 0.026, 0.016,
  0.022, by the fit 0.023, 0.015, 0.017. The cost was up to 1.3 times what the fit says and 1.2
  times what its bound says: scatter around a line does not tell that curves are no lines. Hence
  `MODEL_MARGIN` (with 1.25, a budget of 0.001 AUC cost 0.0011 on globo, seed 0). Early bounds were
  further off (1.4 times in AUC, 2.1 in log loss, one seed of three each); later plans correct that,
  as far as the budget is not spent.
- Skipping one kind of examples only can also shift calibration, which no learning curve tells; the
  guard watches.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

MIN_POINTS = 5  # windows in the later part; fewer tell too little of their own noise
LATER_PART = 0.25  # the later part of a curve: from this share of its length on
CONFIDENCE_Z = 1.6449  # one-sided 95%
MODEL_MARGIN = 1.5  # on the bound of the slope, for what the line itself gets wrong (see above)
MOST_MISSING = 0.9  # of all inputs' worth, however flat the curve: no line reaches further down
MIN_VALUE = 0.05  # of an average input; the estimate is too rough to believe in less
MIN_KEPT_INPUTS = 200  # below, a skipped input counts as an average one
_LONGEST_MEMORY = 0.9  # highest correlation of neighbouring windows that is corrected for
_ROUNDING_ERROR = 1e-12  # relative


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Progressive quality in one window.

    Attributes:
        trained: examples trained before the window began.
        inputs: examples of the window that the quality was measured on, before training on them.
        quality: AUC, log loss, or any measure whose cost is to be bounded; if not finite (an AUC
            of one class only), the point is left out.
    """

    trained: int
    inputs: int
    quality: float


@dataclasses.dataclass(frozen=True)
class LearningCurve:
    """The line a + b * ln(n) through the later part of a curve.

    Attributes:
        slope: b, per e-fold of trained examples; log loss has a negative one while it improves.
        std_error: of the slope.
        bound: |b| is at most this with 95% confidence.
        points: windows in the fit.
    """

    slope: float
    std_error: float
    bound: float
    points: int


@dataclasses.dataclass(frozen=True)
class SharePlan:
    """What to skip of the next windows.

    Attributes:
        share: of the examples offered (not only of the hot ones), 0 to 1.
        predicted_cost: quality missing at the end of training if that is followed, in the
            budget's unit, by `slope`; None if that is not known.
        slope: b as assumed, the bound of the fit times `MODEL_MARGIN`; None with too few windows.
        reason: in words, for the ledger.
    """

    share: float
    predicted_cost: float | None
    slope: float | None
    reason: str


def fit_learning_curve(curve: Sequence[CurvePoint]) -> LearningCurve | None:
    """Fits quality = a + b * ln(n) to the later part of a curve, by weighted least squares.

    n is the number of examples trained by the middle of a window, the weight its number of inputs.
    Where examples of little value are skipped, n grows slower than what was learned, so the slope
    comes out a little too steep: safe.
    The bound is |b| + t * standard error, with Student's t for the few windows there are. The
    error comes from the scatter around the line; if neighbouring windows err alike (correlation r
    > 0), there are fewer independent ones, and it is widened by sqrt((1 + r) / (1 - r)). In
    simulations the bound held in 95% of the curves with independent windows, from 5 windows in
    the fit on, and in 89% to 94% with r = 0.6, from 15 windows on.

    A falling quality has a slope too: what the stream is at the end, early examples taught little
    about. How much late ones matter is then not in the curve; at least as much is assumed.

    Args:
        curve: one point per window.

    Returns:
        The line, or None if the later part has fewer than `MIN_POINTS` windows.
    """
    known = [point for point in curve if math.isfinite(point.quality)]
    end = max((point.trained + point.inputs for point in known), default=0)
    later = [point for point in known if point.trained >= LATER_PART * end]
    later.sort(key=lambda point: point.trained)
    if len(later) < MIN_POINTS:
        return None
    x = np.log([point.trained + point.inputs / 2 for point in later])
    y = np.array([point.quality for point in later], np.float64)
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
    budget: float,
) -> SharePlan:
    """Finds the share of the next examples to skip within a budget of quality.

    Of N planned examples, S effective ones may be missing at the end with b * ln(N / (N - S)) equal
    to the budget: S = N * (1 - exp(-budget / b)), and no more than `MOST_MISSING`; b is the bound
    of the fit times `MODEL_MARGIN`. What is left of S is spread evenly over the examples still to
    come. Call it at each window's end: the bound gets tighter, the value changes, and what was
    skipped beyond or short of the plan is made up for.

    Args:
        curve: progressive quality so far; see the module's docstring for what it must cover.
        planned_inputs: examples that training is offered from start to end, all epochs.
        trained: examples trained so far.
        skipped: examples skipped so far.
        skipped_effective: the same, each counted with its value when it was skipped.
        value: of the examples to be skipped next, by `relative_value`; above 0.
        budget: most quality that skipping may cost in all, above 0 (`max_auc_loss` for a curve of
            AUC, `max_log_loss_increase` for one of log loss).

    Returns:
        The plan. With too few windows for a slope, the share is 0.
    """
    fit = fit_learning_curve(curve)
    if fit is None:
        words = f"Nothing is skipped: the curve's later part has fewer than {MIN_POINTS} windows."
        return SharePlan(0.0, None, None, words)

    # A plan that was too short is as long as training turned out to be.
    total = max(planned_inputs, trained + skipped)
    left = total - trained - skipped
    slope = MODEL_MARGIN * fit.bound
    may_miss = -math.expm1(-budget / slope) if slope else 1.0
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
        words += f"The budget of {budget:g} is used up."
    elif share == 1.0:
        words += f"The budget of {budget:g} allows more than the bound of the share."
    else:
        words += f"The budget of {budget:g} is spread over {left} examples."
    return SharePlan(share, cost, slope, words)


def cost_of_missing(slope: float, total: int, missing: float) -> float:
    """Quality missing at the end of training by the curve; infinite if everything is missing.

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
