// FTRL-proximal as in Keras's Ftrl (McMahan et al., KDD 2013).
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_FTRL_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_FTRL_H_

#include <limits>

#include "cc_ops/core/update/rules/rule_base.h"

namespace slipstream {

// Slots: sums of squared gradients, then linear terms. With a learning rate of 0, rows do not
// change; Keras would divide by 0.
struct Ftrl : RuleBase {
  static constexpr const char* kName = "ftrl";
  static constexpr std::array kDefaults = {-.5f, .1f, 0.f, 0.f, 0.f, 0.f};
  explicit Ftrl(const RuleParameters& p)
      : power(-p[0]), initial_sum(p[1]), l1(p[2]), l2(p[3]), l2_shrinkage(p[4]), beta(p[5]) {}

  int64_t Slots(int64_t dim) const { return 2 * dim; }
  void InitSlots(int64_t dim, float* slots) const { std::fill_n(slots, dim, initial_sum); }

  SLIPSTREAM_ALWAYS_INLINE void Apply(float rate, int64_t dim, const float* __restrict__ gradient,
                                      float* __restrict__ row) const {
    if (rate == 0.f) return;
    // The usual power is a square root, which is vectorized.
    if (power == .5f) {
      ApplyBy(rate, dim, gradient, row,
              [](float sum) SLIPSTREAM_LAMBDA_INLINE { return std::sqrt(sum); });
    } else {
      ApplyBy(rate, dim, gradient, row,
              [this](float sum) SLIPSTREAM_LAMBDA_INLINE { return std::pow(sum, power); });
    }
  }

  // Roots of sums are between the roots of kMinSum and of the largest new sum.
  StepBound Bound(double rate, double gradient, int64_t /*dim*/, double max_value) const {
    if (rate == 0.) return {};
    const float smallest = std::min({power, l1, l2, l2_shrinkage, beta, rate < 0. ? -1.f : 0.f});
    if (smallest < 0.f || power > 1.f) return kUnbounded;
    const double sum = kMaxSquares + 2. * gradient * gradient, root = std::pow(sum, power);
    const double sigma = 2. * root / rate;
    const double force = gradient + (2. * l2_shrinkage + sigma) * max_value;
    const double linear = 2. * (kMaxMoment + force);
    const double divisor = std::pow(static_cast<double>(kMinSum), power) / rate;
    const double largest_divisor = 2. * (sigma + beta / rate + 2. * l2);
    return {2. * linear / divisor, std::max({sum, linear, largest_divisor})};
  }
  SLIPSTREAM_ALWAYS_INLINE bool SlotsInRange(int64_t dim, const float* slots) const {
    return AreBetween(kMinSum, kMaxSquares, dim, slots) && AreAtMost(kMaxMoment, dim, slots + dim);
  }

  // Returns an upper bound for a replica, because its linear terms are unknown. It assumes that the
  // learning rate did not change: then the linear term of a nonzero value follows from the value
  // and its sum of squares. A value that reaches 0 stays 0.
  float Movement(float rate, int64_t dim, const float* gradient, const float* row) const {
    if (rate == 0.f) return 0.f * MeanSquare(dim, gradient);
    return Largest(dim, [&](int64_t j) {
      const float before = row[dim + j], z = row[2 * dim + j];
      const float total = before + gradient[j] * gradient[j];
      const float force = gradient[j] + 2.f * l2_shrinkage * row[j];
      const float quadratic = (std::pow(total, power) + beta) / rate + 2.f * l2;
      if (z != kUnknown) {
        const float sigma = (std::pow(total, power) - std::pow(before, power)) / rate;
        const float next = z + (force - sigma * row[j]);
        const float value = (std::min(std::max(next, -l1), l1) - next) / quadratic;
        return std::fabs(value - row[j]);
      }
      return force == 0.f ? 0.f : std::fabs(force) / quadratic;
    });
  }

  float SlotSummary(int64_t dim, const float* row) const { return Smallest(dim, row + dim); }
  void FillSlots(int64_t dim, float summary, float* slots) const {
    std::fill_n(slots, dim, summary);
    std::fill_n(slots + dim, dim, kUnknown);
  }

  static constexpr float kMinSum = 0x1p-60f;  // Minimum of a sum in range.
  // Linear term of a replica.
  static constexpr float kUnknown = std::numeric_limits<float>::max();
  float power, initial_sum, l1, l2, l2_shrinkage, beta;

 private:
  template <class Power>
  SLIPSTREAM_ALWAYS_INLINE void ApplyBy(float rate, int64_t dim, const float* __restrict__ gradient,
                                        float* __restrict__ row, const Power& root) const {
    float* __restrict__ sum = row + dim;
    float* __restrict__ linear = row + 2 * dim;
    const float minimum = beta / rate + 2.f * l2;
    for (int64_t j = 0; j < dim; ++j) {
      const float g = gradient[j], before = sum[j], total = before + g * g;
      const float root_after = root(total);
      const float sigma = (root_after - root(before)) / rate;
      const float z = linear[j] + (g + 2.f * l2_shrinkage * row[j] - sigma * row[j]);
      sum[j] = total;
      linear[j] = z;
      const float clipped = std::min(std::max(z, -l1), l1);
      row[j] = (clipped - z) / (root_after / rate + minimum);
    }
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_FTRL_H_
