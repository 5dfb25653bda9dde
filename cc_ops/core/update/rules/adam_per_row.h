// Adam with a bias correction per row, by the number of updates of that row.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAM_PER_ROW_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAM_PER_ROW_H_

#include "cc_ops/core/update/rules/adam.h"

namespace slipstream {

// Slots: both moments ([dim] each), then 1 - beta_1^n and 1 - beta_2^n after n updates of the row.
// Storing these numbers instead of n avoids powers in every update, and loses no precision while
// they are small.
struct AdamPerRow : AdamMoments {
  static constexpr const char* kName = "adam_per_row";
  static constexpr std::array kDefaults = {.9f, .999f, 1e-7f};
  using AdamMoments::AdamMoments;

  int64_t Slots(int64_t dim) const { return 2 * dim + 2; }
  float EffectiveRate(float learning_rate, int64_t /*step*/) const { return learning_rate; }

  SLIPSTREAM_ALWAYS_INLINE void Apply(float rate, int64_t dim, const float* __restrict__ gradient,
                                      float* __restrict__ row) const {
    float* const shares = row + 3 * dim;
    Advance(shares);
    Step(rate * Correction(shares), dim, gradient, row, row + dim, row + 2 * dim);
  }

  // After Advance, shares[0] is at least about half of 1 - beta_1.
  StepBound Bound(double rate, double gradient, int64_t /*dim*/, double /*max_value*/) const {
    return BoundOfStep(4. * rate / (1.f - beta_1), gradient, gradient * gradient);
  }
  SLIPSTREAM_ALWAYS_INLINE bool SlotsInRange(int64_t dim, const float* slots) const {
    return AreAtMost(kMaxMoment, dim, slots) && AreBetween(0.f, kMaxSquares, dim, slots + dim) &&
           AreBetween(0.f, 1.f, 2, slots + 2 * dim);
  }

  float Movement(float rate, int64_t dim, const float* gradient, const float* row) const {
    float shares[] = {row[3 * dim], row[3 * dim + 1]};
    Advance(shares);
    return MovementWithMoments(rate * Correction(shares), dim, gradient, row + 2 * dim);
  }

  float SlotSummary(int64_t dim, const float* row) const { return Smallest(dim, row + 2 * dim); }

  // The number of updates of the original row is unknown. The correction is largest either at the
  // first update or after infinitely many.
  void FillSlots(int64_t dim, float summary, float* slots) const {
    std::fill_n(slots + dim, dim, summary);
    float first[] = {0.f, 0.f};
    Advance(first);
    if (Correction(first) < 1.f) std::fill_n(slots + 2 * dim, 2, 1.f);
  }

  void DecaySlots(int64_t dim, float* slots) const {
    Decay(dim, slots, dim, slots + dim);
    Advance(slots + 2 * dim);
  }

 private:
  SLIPSTREAM_ALWAYS_INLINE void Advance(float* shares) const {
    shares[0] += (1.f - beta_1) * (1.f - shares[0]);
    shares[1] += (1.f - beta_2) * (1.f - shares[1]);
  }
  SLIPSTREAM_ALWAYS_INLINE float Correction(const float* shares) const {
    return std::sqrt(shares[1]) / shares[0];
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ADAM_PER_ROW_H_
