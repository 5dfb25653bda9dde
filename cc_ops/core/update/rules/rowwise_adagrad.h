// Adagrad with one sum per row, of the mean squares of its gradients.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROWWISE_ADAGRAD_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROWWISE_ADAGRAD_H_

#include "cc_ops/core/update/rules/rule_base.h"

namespace slipstream {

struct RowWiseAdagrad : RuleBase {
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr bool kStaysInRange = true;
  static constexpr std::array kDefaults = {0.f, 1e-10f};
  explicit RowWiseAdagrad(const RuleParameters& p) : initial_sum(p[0]), epsilon(p[1]) {}

  int64_t Slots(int64_t /*dim*/) const { return 1; }
  void InitSlots(int64_t /*dim*/, float* slots) const { *slots = initial_sum; }

  SLIPSTREAM_ALWAYS_INLINE void Apply(float rate, int64_t dim, const float* __restrict__ gradient,
                                      float* __restrict__ row) const {
    float* sum = row + dim;
    *sum += SumOfSquares(dim, gradient) / static_cast<float>(dim);
    const float factor = rate / std::sqrt(*sum + epsilon);
    for (int64_t j = 0; j < dim; ++j) {
      row[j] -= factor * gradient[j];
    }
  }

  // As in Adagrad. The mean of the squares is at least the largest square divided by `dim`.
  StepBound Bound(double rate, double gradient, int64_t dim, double /*max_value*/) const {
    if (!(epsilon >= kMinEpsilon)) return kUnbounded;
    const double n = static_cast<double>(dim), step = 2. * std::fabs(rate) * std::sqrt(n);
    const double factor = 2. * std::fabs(rate) / std::sqrt(static_cast<double>(epsilon));
    return {step, std::max(factor, kMaxSquares + 2. * n * gradient * gradient)};
  }
  SLIPSTREAM_ALWAYS_INLINE bool SlotsInRange(int64_t /*dim*/, const float* slots) const {
    return AreBetween(0.f, kMaxSquares, 1, slots);
  }
  bool SlotsStayInRange(double /*rate*/, double gradient) const {
    return gradient * gradient <= kAbsorbed * kMaxSquares;
  }

  float Movement(float rate, int64_t dim, const float* gradient, const float* row) const {
    const float sum = row[dim] + MeanSquare(dim, gradient);
    return rate * std::sqrt(LargestSquare(dim, gradient) / (sum + epsilon));
  }

  float SlotSummary(int64_t dim, const float* row) const { return row[dim]; }
  void FillSlots(int64_t /*dim*/, float summary, float* slots) const { *slots = summary; }

  float initial_sum, epsilon;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROWWISE_ADAGRAD_H_
