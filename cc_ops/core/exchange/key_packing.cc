#include "cc_ops/core/exchange/key_packing.h"

#include <string>

namespace slipstream {
namespace {

constexpr int kBits = 7;
constexpr uint8_t kMore = 1u << kBits;
constexpr int kMostBytes = 10;  // of 64 bits

// Small numbers of either sign become small numbers.
uint64_t ZigZag(uint64_t difference) { return (difference << 1) ^ (0 - (difference >> 63)); }
uint64_t UnZigZag(uint64_t coded) { return (coded >> 1) ^ (0 - (coded & 1)); }

}  // namespace

void PackKeys(const int64_t* sizes, int64_t parcels, const int64_t* keys,
              std::vector<uint8_t>* packed, std::vector<int64_t>* ends) {
  packed->clear();
  ends->clear();
  for (int64_t p = 0; p < parcels; ++p) {
    uint64_t previous = 0;
    for (int64_t i = 0; i < sizes[p]; ++i) {
      const uint64_t key = static_cast<uint64_t>(*keys++);
      uint64_t coded = ZigZag(key - previous);
      previous = key;
      for (; coded >= kMore; coded >>= kBits) {
        packed->push_back(static_cast<uint8_t>(coded) | kMore);
      }
      packed->push_back(static_cast<uint8_t>(coded));
    }
    ends->push_back(static_cast<int64_t>(packed->size()));
  }
}

Status UnpackKeys(const int64_t* sizes, int64_t parcels, const uint8_t* packed, int64_t bytes,
                  std::vector<int64_t>* keys) {
  keys->clear();
  int64_t at = 0;
  for (int64_t p = 0; p < parcels; ++p) {
    // Every key takes a byte at least.
    if (sizes[p] < 0 || sizes[p] > bytes - at) {
      return InvalidArgument("parcel " + std::to_string(p) + " has " + std::to_string(sizes[p]) +
                             " keys; left are " + std::to_string(bytes - at) + " bytes");
    }
    uint64_t previous = 0;
    for (int64_t i = 0; i < sizes[p]; ++i) {
      uint64_t coded = 0;
      for (int n = 0;; ++n) {
        if (at == bytes || n == kMostBytes) {
          return InvalidArgument("packed keys end, or are damaged, at byte " + std::to_string(at) +
                                 " of " + std::to_string(bytes));
        }
        const uint8_t byte = packed[at++];
        coded |= static_cast<uint64_t>(byte & (kMore - 1)) << (n * kBits);
        if (byte < kMore) break;
      }
      previous += UnZigZag(coded);
      keys->push_back(static_cast<int64_t>(previous));
    }
  }
  if (at != bytes) {
    return InvalidArgument("packed keys take " + std::to_string(at) + " bytes; there are " +
                           std::to_string(bytes));
  }
  return OkStatus();
}

}  // namespace slipstream
