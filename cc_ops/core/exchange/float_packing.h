// Floats on a wire, without loss: neighbours share the bits of their magnitude.
//
// A block of 16 values is written as its greatest exponent (as the difference to that of the block
// before) and, of each value, the distance to it in 2 bits or more, the sign and the mantissa. Rows
// of embeddings and of gradients take about 27 bits a value instead of 32, and 11 instead of 16.
// Whatever the values are, NaN and infinity too, they come back bit for bit; a block that would not
// become shorter is kept as it is, with a bit that says so.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_FLOAT_PACKING_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_FLOAT_PACKING_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"

namespace slipstream {

// Appends n values to `packed`: bit patterns of float (uint32_t) or bfloat16 (uint16_t). They begin
// and end with a byte of their own.
template <class Bits>
void PackFloats(const Bits* values, int64_t n, std::vector<uint8_t>* packed);

// Reads n values from the first of `bytes` bytes; `used` gets how many they took. InvalidArgument,
// if they are not those of so many values.
template <class Bits>
Status UnpackFloats(const uint8_t* packed, int64_t bytes, int64_t n, Bits* values, int64_t* used);

extern template void PackFloats(const uint16_t*, int64_t, std::vector<uint8_t>*);
extern template void PackFloats(const uint32_t*, int64_t, std::vector<uint8_t>*);
extern template Status UnpackFloats(const uint8_t*, int64_t, int64_t, uint16_t*, int64_t*);
extern template Status UnpackFloats(const uint8_t*, int64_t, int64_t, uint32_t*, int64_t*);

// Fewer bytes than these cannot hold n values: what is to be checked before memory is taken for n.
template <class Bits>
int64_t LeastPackedBytes(int64_t n);

extern template int64_t LeastPackedBytes<uint16_t>(int64_t);
extern template int64_t LeastPackedBytes<uint32_t>(int64_t);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_FLOAT_PACKING_H_
