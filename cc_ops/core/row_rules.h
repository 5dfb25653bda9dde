// The arithmetic of the update rules on one row, to be inlined into functions that are compiled for
// several instruction sets.
#ifndef SLIPSTREAM_CC_OPS_CORE_ROW_RULES_H_
#define SLIPSTREAM_CC_OPS_CORE_ROW_RULES_H_

#include <cmath>
#include <cstdint>

#include "cc_ops/core/simd_clones.h"
#include "cc_ops/core/update_rule.h"

namespace slipstream {

// Sum of squares in an order that fills vectors and is the same everywhere: value j goes to part
// j % 8, parts are added in pairs.
SLIPSTREAM_ALWAYS_INLINE float SumOfSquares(int64_t dim, const float* __restrict__ values) {
  constexpr int64_t kParts = 8;
  float parts[kParts] = {};
  int64_t j = 0;
  for (; j + kParts <= dim; j += kParts) {
    for (int64_t p = 0; p < kParts; ++p) parts[p] += values[j + p] * values[j + p];
  }
  for (int64_t p = 0; j < dim; ++j, ++p) parts[p] += values[j] * values[j];
  for (int64_t width = kParts / 2; width > 0; width /= 2) {
    for (int64_t p = 0; p < width; ++p) parts[p] += parts[p + width];
  }
  return parts[0];
}

// gradient: [dim]. row: [dim], then its slots.
template <UpdateRule::Kind kKind>
SLIPSTREAM_ALWAYS_INLINE void ApplyRule(const UpdateRule& rule, float rate, int64_t dim,
                                        const float* __restrict__ gradient,
                                        float* __restrict__ row) {
  if constexpr (kKind == UpdateRule::Kind::kSgd) {
    for (int64_t j = 0; j < dim; ++j) row[j] -= rate * gradient[j];
  } else if constexpr (kKind == UpdateRule::Kind::kAdagrad) {
    const float epsilon = rule.b;
    float* __restrict__ sum = row + dim;
    for (int64_t j = 0; j < dim; ++j) {
      const float total = sum[j] + gradient[j] * gradient[j];
      sum[j] = total;
      row[j] -= rate * gradient[j] / std::sqrt(total + epsilon);
    }
  } else if constexpr (kKind == UpdateRule::Kind::kRowWiseAdagrad) {
    float* sum = row + dim;
    *sum += SumOfSquares(dim, gradient) / static_cast<float>(dim);
    const float factor = rate / std::sqrt(*sum + rule.b);
    for (int64_t j = 0; j < dim; ++j) row[j] -= factor * gradient[j];
  } else {
    const float beta_1 = rule.a, beta_2 = rule.b, epsilon = rule.c;
    float* __restrict__ m = row + dim;
    float* __restrict__ v = row + 2 * dim;
    for (int64_t j = 0; j < dim; ++j) {
      m[j] += (1.f - beta_1) * (gradient[j] - m[j]);
      v[j] += (1.f - beta_2) * (gradient[j] * gradient[j] - v[j]);
      row[j] -= rate * m[j] / (std::sqrt(v[j]) + epsilon);
    }
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_ROW_RULES_H_
