// Conversions between a float and its bit pattern.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT_BITS_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT_BITS_H_

#include <cstdint>
#include <cstring>

namespace slipstream {

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_FLOAT_BITS_H_
