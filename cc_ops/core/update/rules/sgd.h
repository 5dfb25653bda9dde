// Stochastic gradient descent without momentum.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_SGD_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_SGD_H_

#include "cc_ops/core/update/rules/rule_base.h"

namespace slipstream {

struct Sgd : RuleBase {
  static constexpr const char* kName = "sgd";
  static constexpr bool kStaysInRange = true;
  static constexpr std::array<float, 0> kDefaults = {};
  explicit Sgd(const RuleParameters& /*p*/) {}

  SLIPSTREAM_ALWAYS_INLINE void Apply(float rate, int64_t dim, const float* __restrict__ gradient,
                                      float* __restrict__ row) const {
    for (int64_t j = 0; j < dim; ++j) {
      row[j] -= rate * gradient[j];
    }
  }

  StepBound Bound(double rate, double gradient, int64_t /*dim*/, double /*max_value*/) const {
    return {2. * std::fabs(rate) * gradient};
  }

  float Movement(float rate, int64_t dim, const float* gradient, const float* /*row*/) const {
    return rate * std::sqrt(LargestSquare(dim, gradient));
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_SGD_H_
