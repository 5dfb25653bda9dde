// What the update rules share: the arithmetic of one row, to be inlined into functions that are
// compiled for several instruction sets.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_MATH_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_MATH_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cc_ops/core/base/simd_clones.h"

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

// Cuts values to [-most, most]; NaN stays. Vectors are asked for, as above: among other loops
// compilers leave this one its branches.
SLIPSTREAM_ALWAYS_INLINE void Limit(float most, int64_t dim, float* __restrict__ values) {
  constexpr int64_t kParts = 8;
  using Parts __attribute__((vector_size(kParts * sizeof(float)))) = float;
  const Parts high = Parts{} + most, low = -high;
  int64_t j = 0;
  for (; j + kParts <= dim; j += kParts) {
    Parts own;
    std::memcpy(&own, values + j, sizeof(own));
    own = own < low ? low : own;
    own = own > high ? high : own;
    std::memcpy(values + j, &own, sizeof(own));
  }
  for (; j < dim; ++j) values[j] = std::min(std::max(values[j], -most), most);
}

// The largest of value(j), all at least 0, for j below dim; or a NaN, if there is one: nothing is
// to hide a damaged row. By the bits, whose order is theirs, NaNs last: of them compilers make
// vectors. value is to be inlined.
template <class Value>
SLIPSTREAM_ALWAYS_INLINE float Largest(int64_t dim, const Value& value) {
  uint32_t most = 0;
  for (int64_t j = 0; j < dim; ++j) {
    const float own = value(j);
    uint32_t bits;
    std::memcpy(&bits, &own, sizeof(bits));
    most = std::max(most, bits);
  }
  float largest;
  std::memcpy(&largest, &most, sizeof(largest));
  return largest;
}

SLIPSTREAM_ALWAYS_INLINE float LargestSquare(int64_t dim, const float* values) {
  return Largest(dim, [&](int64_t j) SLIPSTREAM_LAMBDA_INLINE { return values[j] * values[j]; });
}

inline float MeanSquare(int64_t dim, const float* values) {
  float squares = 0.f;
  for (int64_t j = 0; j < dim; ++j) squares += values[j] * values[j];
  return squares / static_cast<float>(dim);
}

inline float Smallest(int64_t count, const float* values) {
  return *std::min_element(values, values + count);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_MATH_H_
