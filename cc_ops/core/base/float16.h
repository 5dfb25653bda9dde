// Halves of IEEE 754, and back.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT16_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT16_H_

#include <algorithm>
#include <cstdint>

#include "cc_ops/core/base/float_bits.h"

namespace slipstream {

// To the nearest half, ties to even; a finite value stays finite (up to 65504), a NaN one.
inline uint16_t RoundToFloat16(float value) {
  constexpr uint32_t kInfinity = 0x7f800000u, kLeastNormal = 113u << 23, kLargest = 0x7bffu;
  const uint32_t bits = BitsOf(value), magnitude = bits & 0x7fffffffu;
  // The last bit of a float next to .5 is 2^-24, as that of a half below 2^-14.
  const uint32_t small = BitsOf(FloatOf(magnitude) + .5f) - BitsOf(.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  uint32_t half = magnitude < kLeastNormal ? small : std::min(normal, kLargest);
  if (magnitude >= kInfinity) half = magnitude == kInfinity ? 0x7c00u : 0x7e00u;
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | half);
}

// Makes no subnormal float in between: threads may take those for 0.
inline float FromFloat16(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t small = BitsOf(FloatOf(BitsOf(.5f) + magnitude) - .5f);
  uint32_t bits = magnitude < 0x400u ? small : (magnitude << 13) + (112u << 23);
  if (magnitude >= 0x7c00u) bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  return FloatOf(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT16_H_
