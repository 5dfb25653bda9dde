// Conversions between float and bfloat16, the upper half of a float.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_BFLOAT16_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_BFLOAT16_H_

#include <cstdint>

#include "cc_ops/core/base/float_bits.h"

namespace slipstream {

// Rounds to the nearest bfloat16, ties to even. A NaN remains a NaN.
inline uint16_t RoundToBfloat16(float value) {
  const uint32_t bits = BitsOf(value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float FromBfloat16(uint16_t upper) { return FloatOf(static_cast<uint32_t>(upper) << 16); }

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_BFLOAT16_H_
