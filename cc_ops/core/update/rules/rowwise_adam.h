// Adam with one second moment per row, of the mean squares of its gradients.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROWWISE_ADAM_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROWWISE_ADAM_H_

#include "cc_ops/core/update/rules/adam.h"

namespace slipstream {

// Slots: the first moments, then the second moment.
struct RowWiseAdam : AdamMoments {
  static constexpr const char* kName = "rowwise_adam";
  static constexpr std::array kDefaults = {.9f, .999f, 1e-7f};
  using AdamMoments::AdamMoments;

  int64_t Slots(int64_t dim) const { return dim + 1; }

  SLIPSTREAM_ALWAYS_INLINE void Apply(float rate, int64_t dim, const float* __restrict__ gradient,
                                      float* __restrict__ row) const {
    float* __restrict__ m = row + dim;
    float* v = row + 2 * dim;
    const float mean = SumOfSquares(dim, gradient) / static_cast<float>(dim);
    *v += (1.f - beta_2) * (mean - *v);
    const float factor = rate / (std::sqrt(*v) + epsilon);
    for (int64_t j = 0; j < dim; ++j) {
      m[j] += (1.f - beta_1) * (gradient[j] - m[j]);
      row[j] -= factor * m[j];
    }
  }

  StepBound Bound(double rate, double gradient, int64_t dim, double /*max_value*/) const {
    return BoundOfStep(rate, gradient, static_cast<double>(dim) * gradient * gradient);
  }
  SLIPSTREAM_ALWAYS_INLINE bool SlotsInRange(int64_t dim, const float* slots) const {
    return AreAtMost(kMaxMoment, dim, slots) && AreBetween(0.f, kMaxSquares, 1, slots + dim);
  }

  // Without momentum, as in Adam.
  float Movement(float rate, int64_t dim, const float* gradient, const float* row) const {
    const float v = row[2 * dim];
    const float second = v + (1.f - beta_2) * (MeanSquare(dim, gradient) - v);
    return rate * std::sqrt(LargestSquare(dim, gradient)) / (std::sqrt(second) + epsilon);
  }

  float SlotSummary(int64_t dim, const float* row) const { return row[2 * dim]; }
  void FillSlots(int64_t dim, float summary, float* slots) const { slots[dim] = summary; }
  void DecaySlots(int64_t dim, float* slots) const { Decay(dim, slots, 1, slots + dim); }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROWWISE_ADAM_H_
