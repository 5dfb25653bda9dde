// What is done to gradients and rows beside the rule, whichever that is.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_TRANSFORMS_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_TRANSFORMS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rules/row_math.h"

namespace slipstream {

// What the number of an update, the learning rate and the table's scale come to.
struct StepRates {
  // The factor on the gradient: the learning rate, bias-corrected where the rule does so by table.
  float rate = 0.f;
  // What is left of a row that decays.
  float kept = 1.f;
  // What rows that are rounded by chance are rounded by, with their keys (RowLayout).
  uint64_t rounding = 0;
  // RowStore::scale before the update and after it. They are 1 unless all rows decay.
  float scale = 1.f, next_scale = 1.f;
};

// In this order: the gradient gets that of the penalty, is clipped by value and by its norm; the
// row decays; the rule; the row's norm is bounded. What is 0 is not done.
struct RowTransforms {
  float l2 = 0.f;          // of the penalty l2 * |row|^2, once for each update of the row
  float clip_value = 0.f;  // most of |gradient| in any value
  float clip_norm = 0.f;   // most of the gradient's norm
  float decay = 0.f;       // of the row by learning rate * decay * row
  float max_norm = 0.f;    // most of the row's norm
  // Whether rows that a batch lacks decay and are penalised, too.
  bool of_all_rows = false;

  bool DecaysAll() const { return of_all_rows && decay != 0.f; }
  // Whether rows that a batch lacks are updated, one by one, as by a gradient of 0.
  bool SweepsAll() const { return of_all_rows && l2 != 0.f; }

  bool any() const { return any_of_gradient() || decay != 0.f || max_norm != 0.f; }
  bool any_of_gradient() const { return l2 != 0.f || clip_value != 0.f || clip_norm != 0.f; }

  // What is left of a row that decays; not less than nothing.
  double Kept(float learning_rate) const {
    return std::max(0., 1. - static_cast<double>(learning_rate) * decay);
  }

  // scale: of the row as it lies in memory.
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
    // The next scale has the decay in it, to more digits than a factor near 1 would.
    if (decay != 0.f) Multiply(of_all_rows ? rates.next_scale : rates.kept, dim, row);
  }

  SLIPSTREAM_ALWAYS_INLINE void AfterRule(const StepRates& rates, int64_t dim,
                                          float* __restrict__ row) const {
    if (max_norm != 0.f) Shorten(max_norm, dim, row);
    if (DecaysAll()) Multiply(1.f / rates.next_scale, dim, row);
  }

 private:
  static SLIPSTREAM_ALWAYS_INLINE void Shorten(float most, int64_t dim,
                                               float* __restrict__ values) {
    const float norm = std::sqrt(SumOfSquares(dim, values));
    if (norm <= most) return;
    Multiply(most / norm, dim, values);
  }

  static SLIPSTREAM_ALWAYS_INLINE void Multiply(float factor, int64_t dim,
                                                float* __restrict__ values) {
    for (int64_t j = 0; j < dim; ++j) values[j] *= factor;
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_TRANSFORMS_H_
