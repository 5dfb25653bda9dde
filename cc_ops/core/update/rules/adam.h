// Adam with sparse updates: moments of rows that are not in the batch do not decay (Kingma and Ba,
// ICLR 2015).
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAM_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAM_H_

#include "cc_ops/core/update/rules/rule_base.h"

namespace slipstream {

// The moments of Adam and their bias correction.
struct AdamMoments : RuleBase {
  static constexpr bool kStaysInRange = true;
  explicit AdamMoments(const RuleParameters& p) : beta_1(p[0]), beta_2(p[1]), epsilon(p[2]) {}

  // Bias correction by the number of updates of the table.
  float EffectiveRate(float learning_rate, int64_t step) const {
    const double t = static_cast<double>(step);
    const double correction = std::sqrt(1.0 - std::pow(static_cast<double>(beta_2), t)) /
                              (1.0 - std::pow(static_cast<double>(beta_1), t));
    return static_cast<float>(learning_rate * correction);
  }

  // Applies one step. row, and the first and second moments m and v: [dim].
  SLIPSTREAM_ALWAYS_INLINE void Step(float rate, int64_t dim, const float* __restrict__ gradient,
                                     float* __restrict__ row, float* __restrict__ m,
                                     float* __restrict__ v) const {
    for (int64_t j = 0; j < dim; ++j) {
      m[j] += (1.f - beta_1) * (gradient[j] - m[j]);
      v[j] += (1.f - beta_2) * (gradient[j] * gradient[j] - v[j]);
      row[j] -= rate * m[j] / (std::sqrt(v[j]) + epsilon);
    }
  }

  // rate: of Step. squares: largest sum of squares of gradients. The moments stay between the
  // previous moments and the gradient or its square, so second moments do not become negative.
  StepBound BoundOfStep(double rate, double gradient, double squares) const {
    const bool is_mean = beta_1 >= 0.f && beta_1 <= 1.f && beta_2 >= 0.f && beta_2 <= 1.f;
    if (!is_mean || !(epsilon >= kMinEpsilon)) return kUnbounded;
    const double first = 4. * kMaxMoment + 2. * gradient;
    const double factor = 2. * std::fabs(rate) * std::max(1., 1. / epsilon);
    return {factor * first, std::max(factor * first, 4. * kMaxSquares + 2. * squares)};
  }

  // A new moment is at most the old one, or twice the magnitude or square of the gradient.
  bool SlotsStayInRange(double /*rate*/, double gradient) const {
    return gradient <= kMaxMoment / 4. && gradient * gradient <= kMaxSquares / 4.;
  }

  // Returns the Movement (UpdateRule) for second moments v ([dim]), without momentum: rate *
  // |gradient| over the root of the updated second moment, so that a sum of n similar gradients
  // counts as n steps.
  SLIPSTREAM_ALWAYS_INLINE float MovementWithMoments(float rate, int64_t dim, const float* gradient,
                                                     const float* v) const {
    return rate * Largest(dim, [&](int64_t j) SLIPSTREAM_LAMBDA_INLINE {
             const float second = v[j] + (1.f - beta_2) * (gradient[j] * gradient[j] - v[j]);
             return std::fabs(gradient[j]) / (std::sqrt(second) + epsilon);
           });
  }

  // Decays first moments m ([dim]) and second moments v ([seconds]) as with a gradient of 0.
  void Decay(int64_t dim, float* m, int64_t seconds, float* v) const {
    for (int64_t j = 0; j < dim; ++j) m[j] *= beta_1;
    for (int64_t j = 0; j < seconds; ++j) v[j] *= beta_2;
  }

  float beta_1, beta_2, epsilon;
};

struct Adam : AdamMoments {
  static constexpr const char* kName = "adam";
  static constexpr std::array kDefaults = {.9f, .999f, 1e-7f};
  using AdamMoments::AdamMoments;

  int64_t Slots(int64_t dim) const { return 2 * dim; }

  SLIPSTREAM_ALWAYS_INLINE void Apply(float rate, int64_t dim, const float* __restrict__ gradient,
                                      float* __restrict__ row) const {
    Step(rate, dim, gradient, row, row + dim, row + 2 * dim);
  }

  StepBound Bound(double rate, double gradient, int64_t /*dim*/, double /*max_value*/) const {
    return BoundOfStep(rate, gradient, gradient * gradient);
  }
  SLIPSTREAM_ALWAYS_INLINE bool SlotsInRange(int64_t dim, const float* slots) const {
    return AreAtMost(kMaxMoment, dim, slots) && AreBetween(0.f, kMaxSquares, dim, slots + dim);
  }

  float Movement(float rate, int64_t dim, const float* gradient, const float* row) const {
    return MovementWithMoments(rate, dim, gradient, row + 2 * dim);
  }

  float SlotSummary(int64_t dim, const float* row) const { return Smallest(dim, row + 2 * dim); }
  void FillSlots(int64_t dim, float summary, float* slots) const {
    std::fill_n(slots + dim, dim, summary);
  }
  void DecaySlots(int64_t dim, float* slots) const { Decay(dim, slots, dim, slots + dim); }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAM_H_
