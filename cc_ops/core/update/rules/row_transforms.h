// Changes of gradients and rows around any update rule: penalty, clipping, decay, norm limit.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_TRANSFORMS_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_TRANSFORMS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rules/row_math.h"

namespace slipstream {

// Factors of one update, derived from its number, the learning rate and the scale of the table.
struct StepRates {
  // Factor of the gradient: the learning rate, with bias correction if the rule has one per table.
  float rate = 0.f;
  // Fraction of a row that remains after its decay.
  float kept = 1.f;
  // Seed of the stochastic rounding of rows, combined with their keys (RowLayout).
  uint64_t rounding = 0;
  // RowStore::scale before and after the update; 1 unless all rows decay.
  float scale = 1.f, next_scale = 1.f;
};

// Settings of the changes. Applied in this order: add the gradient of the penalty, clip the
// gradient by value, clip it by norm, decay the row, apply the rule, limit the norm of the row. A
// setting of 0 disables its step.
struct RowTransforms {
  float l2 = 0.f;          // Penalty l2 * |row|^2, once for each update of the row.
  float clip_value = 0.f;  // Maximum of |gradient| per value.
  float clip_norm = 0.f;   // Maximum norm of the gradient.
  float decay = 0.f;       // Decay by learning rate * decay * row.
  float max_norm = 0.f;    // Maximum norm of the row.
  // Whether decay and penalty also apply to rows that are not in the batch.
  bool of_all_rows = false;

  bool DecaysAll() const { return of_all_rows && decay != 0.f; }
  // Whether rows that are not in the batch are updated one by one with a gradient of 0.
  bool SweepsAll() const { return of_all_rows && l2 != 0.f; }

  bool any() const { return any_of_gradient() || decay != 0.f || max_norm != 0.f; }
  // Whether the transforms only shrink gradients and rows, so that rows stay in range if the rule
  // alone keeps them there. A decay of all rows enlarges the steps of stored values.
  bool OnlyShrink() const { return l2 == 0.f && !of_all_rows; }
  bool any_of_gradient() const { return l2 != 0.f || clip_value != 0.f || clip_norm != 0.f; }

  // Fraction of a row that remains after its decay; at least 0.
  double Kept(float learning_rate) const {
    return std::max(0., 1. - static_cast<double>(learning_rate) * decay);
  }

  // scale: factor of the stored row (RowStore::scale).
  SLIPSTREAM_ALWAYS_INLINE void ToGradient(float scale, int64_t dim, float* __restrict__ gradient,
                                           const float* __restrict__ row) const {
    if (l2 != 0.f) {
      const float factor = 2.f * l2 * scale;
      for (int64_t j = 0; j < dim; ++j) gradient[j] += factor * row[j];
    }
    if (clip_value != 0.f) Limit(clip_value, dim, gradient);
    if (clip_norm != 0.f) Shorten(clip_norm, dim, gradient);
  }

  SLIPSTREAM_ALWAYS_INLINE void BeforeRule(const StepRates& rates, int64_t dim,
                                           float* __restrict__ gradient,
                                           float* __restrict__ row) const {
    ToGradient(rates.scale, dim, gradient, row);
    // next_scale includes the decay, with more precision than a factor near 1.
    if (decay != 0.f) Multiply(of_all_rows ? rates.next_scale : rates.kept, dim, row);
  }

  SLIPSTREAM_ALWAYS_INLINE void AfterRule(const StepRates& rates, int64_t dim,
                                          float* __restrict__ row) const {
    if (max_norm != 0.f) Shorten(max_norm, dim, row);
    if (DecaysAll()) Multiply(1.f / rates.next_scale, dim, row);
  }

 private:
  static SLIPSTREAM_ALWAYS_INLINE void Shorten(float maximum, int64_t dim,
                                               float* __restrict__ values) {
    const float norm = std::sqrt(SumOfSquares(dim, values));
    if (norm <= maximum) return;
    if (norm <= std::numeric_limits<float>::max()) return Multiply(maximum / norm, dim, values);
    ShortenHuge(maximum, dim, values);
  }
  // Same, if the squares overflow. Not inlined, because it would slow down the loops around it.
  static void ShortenHuge(float maximum, int64_t dim, float* values);

  static SLIPSTREAM_ALWAYS_INLINE void Multiply(float factor, int64_t dim,
                                                float* __restrict__ values) {
    for (int64_t j = 0; j < dim; ++j) values[j] *= factor;
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_TRANSFORMS_H_
