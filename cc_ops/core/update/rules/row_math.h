// Arithmetic on one row that the update rules share. Functions with SLIPSTREAM_ALWAYS_INLINE are
// compiled for each instruction set of their caller (see simd_clones.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_MATH_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_MATH_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {

// Returns the sum of squares of `values` ([dim]), added in a fixed order that vectorizes: value j
// is added to part j % 8, then parts are added in pairs. Uses vector types, because compilers would
// otherwise also transform the loop of the caller into which this function is inlined.
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

// Clips values to [-maximum, maximum]; a NaN stays. Uses vector types, because compilers keep
// branches in this loop when it is inlined.
SLIPSTREAM_ALWAYS_INLINE void Limit(float maximum, int64_t dim, float* __restrict__ values) {
  constexpr int64_t kParts = 8;
  using Parts __attribute__((vector_size(kParts * sizeof(float)))) = float;
  const Parts high = Parts{} + maximum, low = -high;
  int64_t j = 0;
  for (; j + kParts <= dim; j += kParts) {
    Parts own;
    std::memcpy(&own, values + j, sizeof(own));
    own = own < low ? low : own;
    own = own > high ? high : own;
    std::memcpy(values + j, &own, sizeof(own));
  }
  for (; j < dim; ++j) values[j] = std::min(std::max(values[j], -maximum), maximum);
}

// Returns the largest of value(j) >= 0 for j < dim, or a NaN if there is one, so that a damaged row
// is not hidden. Compares the bits as integers, which compilers vectorize: positive floats have the
// same order as their bits, and NaNs are larger. `value` must be inlined.
template <class Value>
SLIPSTREAM_ALWAYS_INLINE float Largest(int64_t dim, const Value& value) {
  uint32_t maximum = 0;
  for (int64_t j = 0; j < dim; ++j) {
    const float own = value(j);
    uint32_t bits;
    std::memcpy(&bits, &own, sizeof(bits));
    maximum = std::max(maximum, bits);
  }
  float largest;
  std::memcpy(&largest, &maximum, sizeof(largest));
  return largest;
}

// Returns whether all of `values` ([n]) are between two numbers of at least 0; false for a NaN or
// -0. Compares bits as integers and finds their maximum, which compilers vectorize.
SLIPSTREAM_ALWAYS_INLINE bool AreBetween(float minimum, float maximum, int64_t n,
                                         const float* values) {
  uint32_t low, high, largest = 0;
  std::memcpy(&low, &minimum, sizeof(low));
  std::memcpy(&high, &maximum, sizeof(high));
  for (int64_t j = 0; j < n; ++j) {
    uint32_t bits;
    std::memcpy(&bits, values + j, sizeof(bits));
    largest = std::max(largest, bits - low);
  }
  return largest <= high - low;
}

// Same, whether the magnitudes of the values are at most `maximum`.
SLIPSTREAM_ALWAYS_INLINE bool AreAtMost(float maximum, int64_t n, const float* values) {
  uint32_t high, largest = 0;
  std::memcpy(&high, &maximum, sizeof(high));
  for (int64_t j = 0; j < n; ++j) {
    uint32_t bits;
    std::memcpy(&bits, values + j, sizeof(bits));
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest <= high;
}

// Returns the largest square of `values` ([dim]), or a NaN if there is one.
SLIPSTREAM_ALWAYS_INLINE float LargestSquare(int64_t dim, const float* values) {
  return Largest(dim, [&](int64_t j) SLIPSTREAM_LAMBDA_INLINE { return values[j] * values[j]; });
}

// Returns the mean of the squares of `values` ([dim]). dim: at least 1.
inline float MeanSquare(int64_t dim, const float* values) {
  float squares = 0.f;
  for (int64_t j = 0; j < dim; ++j) squares += values[j] * values[j];
  return squares / static_cast<float>(dim);
}

// Returns the smallest of `values` ([count]). count: at least 1.
inline float Smallest(int64_t count, const float* values) {
  return *std::min_element(values, values + count);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ROW_MATH_H_
