// SGD with momentum as in Keras's SGD: the learning rate is part of the velocity. Rows that are not
// in the batch do not move and keep their velocity.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_MOMENTUM_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_MOMENTUM_H_

#include "cc_ops/core/update/rules/rule_base.h"

namespace slipstream {

struct Momentum : RuleBase {
  static constexpr const char* kName = "momentum";
  static constexpr bool kStaysInRange = true;
  static constexpr std::array kDefaults = {.9f, 0.f};
  explicit Momentum(const RuleParameters& p) : momentum(p[0]), is_nesterov(p[1] != 0.f) {}

  int64_t Slots(int64_t dim) const { return dim; }

  SLIPSTREAM_ALWAYS_INLINE void Apply(float rate, int64_t dim, const float* __restrict__ gradient,
                                      float* __restrict__ row) const {
    float* __restrict__ velocity = row + dim;
    // Factors of the new velocity and of the step of this gradient.
    const float of_velocity = is_nesterov ? momentum : 1.f, of_step = is_nesterov ? 1.f : 0.f;
    for (int64_t j = 0; j < dim; ++j) {
      const float step = rate * gradient[j];
      const float next = velocity[j] * momentum - step;
      velocity[j] = next;
      row[j] -= of_step * step - of_velocity * next;
    }
  }

  StepBound Bound(double rate, double gradient, int64_t /*dim*/, double /*max_value*/) const {
    if (!(std::fabs(momentum) <= 1.f)) return kUnbounded;
    const double step = 2. * std::fabs(rate) * gradient, velocity = kMaxMoment + step;
    return {step + velocity, velocity};
  }
  SLIPSTREAM_ALWAYS_INLINE bool SlotsInRange(int64_t dim, const float* slots) const {
    return AreAtMost(kMaxMoment, dim, slots);
  }
  bool SlotsStayInRange(double rate, double gradient) const {
    // The product with the momentum decreases the velocity by more than rounding may increase it.
    const double decrease = 1. - std::fabs(static_cast<double>(momentum));
    return decrease >= 0x1p-20 && 4. * std::fabs(rate) * gradient <= decrease * kMaxMoment;
  }

  // Ignores the velocity, so that a sum of n similar gradients counts as n steps.
  float Movement(float rate, int64_t dim, const float* gradient, const float* /*row*/) const {
    const float steps = is_nesterov ? 1.f + momentum : 1.f;
    return rate * steps * std::sqrt(LargestSquare(dim, gradient));
  }

  void DecaySlots(int64_t dim, float* slots) const {
    for (int64_t j = 0; j < dim; ++j) slots[j] *= momentum;
  }

  float momentum;
  bool is_nesterov;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_MOMENTUM_H_
