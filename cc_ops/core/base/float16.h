// Conversions between float and IEEE 754 half precision.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT16_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT16_H_

#include <algorithm>
#include <cstdint>

#include "cc_ops/core/base/float_bits.h"

namespace slipstream {

// Rounds to the nearest half, ties to even. Finite values stay finite (at most 65504); a NaN
// remains a NaN.
inline uint16_t RoundToFloat16(float value) {
  constexpr uint32_t kInfinity = 0x7f800000u, kMinNormal = 113u << 23, kLargest = 0x7bffu;
  const uint32_t bits = BitsOf(value), magnitude = bits & 0x7fffffffu;
  // Halves below 2^-14 are multiples of 2^-24, which is the last bit of a float near .5. The
  // addition therefore rounds small values. It is computed for all values, because a branch would
  // prevent vectorization.
  const float beside_half = FloatOf(std::min(magnitude, kMinNormal)) + .5f;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t is_small = 0u - static_cast<uint32_t>(magnitude < kMinNormal);
  const uint32_t is_finite = 0u - static_cast<uint32_t>(magnitude < kInfinity);
  const uint32_t is_nan = static_cast<uint32_t>(magnitude > kInfinity) << 9;
  const uint32_t finite =
      (is_small & (BitsOf(beside_half) - BitsOf(.5f))) | (~is_small & std::min(normal, kLargest));
  const uint32_t half = (is_finite & finite) | (~is_finite & (0x7c00u | is_nan));
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | half);
}

// Creates no subnormal float as an intermediate, because threads may flush subnormals to 0.
inline float FromFloat16(uint16_t half) {
  constexpr uint32_t kInfinity = 0x7c00u, kMinNormal = 0x400u;
  const uint32_t magnitude = half & 0x7fffu;
  // Halves below the smallest normal are multiples of 2^-24. The product is computed for all
  // values, because a branch would prevent vectorization.
  const uint32_t small = BitsOf(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t is_small = 0u - static_cast<uint32_t>(magnitude < kMinNormal);
  // Map the largest exponent of a half (infinity, NaN) to the largest exponent of a float.
  const uint32_t beyond = (0u - static_cast<uint32_t>(magnitude >= kInfinity)) & (112u << 23);
  const uint32_t large = (magnitude << 13) + (112u << 23) + beyond;
  const uint32_t bits = (is_small & small) | (~is_small & large);
  return FloatOf(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT16_H_
