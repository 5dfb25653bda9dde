// Adagrad, with one sum of squared gradients per value (Duchi et al., JMLR 2011).
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAGRAD_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAGRAD_H_

#include "cc_ops/core/update/rules/rule_base.h"

namespace slipstream {

struct Adagrad : RuleBase {
  static constexpr const char* kName = "adagrad";
  static constexpr bool kStaysInRange = true;
  static constexpr std::array kDefaults = {0.f, 1e-10f};
  explicit Adagrad(const RuleParameters& p) : initial_sum(p[0]), epsilon(p[1]) {}

  int64_t Slots(int64_t dim) const { return dim; }
  void InitSlots(int64_t dim, float* slots) const { std::fill_n(slots, dim, initial_sum); }

  SLIPSTREAM_ALWAYS_INLINE void Apply(float rate, int64_t dim, const float* __restrict__ gradient,
                                      float* __restrict__ row) const {
    float* __restrict__ sum = row + dim;
    for (int64_t j = 0; j < dim; ++j) {
      const float total = sum[j] + gradient[j] * gradient[j];
      sum[j] = total;
      row[j] -= rate * gradient[j] / std::sqrt(total + epsilon);
    }
  }

  // The divisor is at least the magnitude of the gradient. If the square of the gradient
  // underflows, the gradient is much smaller than the root of epsilon.
  StepBound Bound(double rate, double gradient, int64_t /*dim*/, double /*max_value*/) const {
    if (!(epsilon >= kMinEpsilon)) return kUnbounded;
    const double product = 2. * std::fabs(rate) * gradient;
    return {2. * std::fabs(rate), std::max(product, kMaxSquares + 2. * gradient * gradient)};
  }
  SLIPSTREAM_ALWAYS_INLINE bool SlotsInRange(int64_t dim, const float* slots) const {
    return AreBetween(0.f, kMaxSquares, dim, slots);
  }
  bool SlotsStayInRange(double /*rate*/, double gradient) const {
    return gradient * gradient <= kAbsorbed * kMaxSquares;
  }

  // Compare squares, which needs only one square root.
  SLIPSTREAM_ALWAYS_INLINE float Movement(float rate, int64_t dim, const float* gradient,
                                          const float* row) const {
    const float maximum = Largest(dim, [&](int64_t j) SLIPSTREAM_LAMBDA_INLINE {
      const float square = gradient[j] * gradient[j];
      return square / (row[dim + j] + square + epsilon);
    });
    return rate * std::sqrt(maximum);
  }

  float SlotSummary(int64_t dim, const float* row) const { return Smallest(dim, row + dim); }
  void FillSlots(int64_t dim, float summary, float* slots) const {
    std::fill_n(slots, dim, summary);
  }

  float initial_sum, epsilon;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAGRAD_H_
