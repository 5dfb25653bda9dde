// Keys on a wire: parcels of keys as differences, seven bits to a byte.
//
// Ascending keys take one or two bytes each where tables are dense in the batch, nine
// or ten where they are hashes; any order is packed and unpacked rightly.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_KEY_PACKING_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_KEY_PACKING_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"

namespace slipstream {

// sizes: [parcels], keys of each, which must be all keys. Each parcel is packed on its
// own; `ends` gets the bytes up to the end of each.
void PackKeys(const int64_t* sizes, int64_t parcels, const int64_t* keys,
              std::vector<uint8_t>* packed, std::vector<int64_t>* ends);

// The keys again. InvalidArgument if the bytes are not those of so many keys.
Status UnpackKeys(const int64_t* sizes, int64_t parcels, const uint8_t* packed, int64_t bytes,
                  std::vector<int64_t>* keys);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_KEY_PACKING_H_
