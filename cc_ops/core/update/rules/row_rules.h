// The arithmetic of the update rules on one row, to be inlined into functions that are compiled for
// several instruction sets.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_RULES_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_RULES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rules/update_rule.h"

namespace slipstream {

// Sum of squares in an order that fills vectors and is the same everywhere: value j goes to part
// j % 8, parts are added in pairs. Vectors are asked for: left to find them, compilers take the
// loops around apart, too.
SLIPSTREAM_ALWAYS_INLINE float SumOfSquares(int64_t dim, const float* __restrict__ values) {
  constexpr int64_t kParts = 8;
  using Parts __attribute__((vector_size(kParts * sizeof(float)))) = float;
  using Half __attribute__((vector_size(kParts / 2 * sizeof(float)))) = float;
  Parts parts = {};
  int64_t j = 0;
  for (; j + kParts <= dim; j += kParts) {
    Parts own;
    std::memcpy(&own, values + j, sizeof(own));
    parts += own * own;
  }
  for (int64_t p = 0; j < dim; ++j, ++p) parts[p] += values[j] * values[j];
  Half halves[2];
  std::memcpy(halves, &parts, sizeof(parts));
  const Half half = halves[0] + halves[1];
  return (half[0] + half[2]) + (half[1] + half[3]);
}

// Moves a value back by a step, and tells how far it came.
SLIPSTREAM_ALWAYS_INLINE float MoveBack(float step, float* value) {
  const float before = *value;
  *value = before - step;
  return *value - before;
}

// gradient: [dim]; with kReturnsDelta it becomes the row after less the row before.
// row: [dim], then its slots.
template <UpdateRule::Kind kKind, bool kReturnsDelta>
SLIPSTREAM_ALWAYS_INLINE void ApplyRule(
    const UpdateRule& rule, float rate, int64_t dim,
    std::conditional_t<kReturnsDelta, float, const float>* __restrict__ gradient,
    float* __restrict__ row) {
  const auto move = [&](int64_t j, float step) {
    const float delta = MoveBack(step, &row[j]);
    if constexpr (kReturnsDelta) gradient[j] = delta;
  };
  if constexpr (kKind == UpdateRule::Kind::kSgd) {
    for (int64_t j = 0; j < dim; ++j) move(j, rate * gradient[j]);
  } else if constexpr (kKind == UpdateRule::Kind::kAdagrad) {
    const float epsilon = rule.b;
    float* __restrict__ sum = row + dim;
    for (int64_t j = 0; j < dim; ++j) {
      const float total = sum[j] + gradient[j] * gradient[j];
      sum[j] = total;
      move(j, rate * gradient[j] / std::sqrt(total + epsilon));
    }
  } else if constexpr (kKind == UpdateRule::Kind::kRowWiseAdagrad) {
    float* sum = row + dim;
    *sum += SumOfSquares(dim, gradient) / static_cast<float>(dim);
    const float factor = rate / std::sqrt(*sum + rule.b);
    for (int64_t j = 0; j < dim; ++j) move(j, factor * gradient[j]);
  } else {
    const float beta_1 = rule.a, beta_2 = rule.b, epsilon = rule.c;
    float* __restrict__ m = row + dim;
    float* __restrict__ v = row + 2 * dim;
    for (int64_t j = 0; j < dim; ++j) {
      m[j] += (1.f - beta_1) * (gradient[j] - m[j]);
      v[j] += (1.f - beta_2) * (gradient[j] * gradient[j] - v[j]);
      move(j, rate * m[j] / (std::sqrt(v[j]) + epsilon));
    }
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_RULES_H_
