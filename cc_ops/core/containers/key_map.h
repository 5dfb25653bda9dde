// Where a key is in a list, and its state: e.g. of rows that are read from copies, or the states of
// a table's keys. Built once a window, probed every step.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_MAP_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_MAP_H_

#include <cstdint>
#include <string>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/flat_table.h"

namespace slipstream {

// Hashed rather than sorted: a key costs one or two reads of 32 bytes, which is what a GPU fetches
// at least, where a binary search among a million keys waits for twenty reads, each for the other.
struct alignas(16) KeyMapEntry {
  using Key = int64_t;
  static constexpr int64_t kLine = 1;
  static constexpr int32_t kNowhere = -1;

  int64_t key = 0;
  int32_t index = kNowhere;  // in the list of keys; kNowhere: the entry is free
  uint32_t state = 0;

  SLIPSTREAM_HOST_DEVICE static uint64_t Hash(int64_t key, uint64_t seed) {
    return KeyedHash(key, seed);
  }
  SLIPSTREAM_HOST_DEVICE bool is_free() const { return index == kNowhere; }
  SLIPSTREAM_HOST_DEVICE bool Is(int64_t other) const { return key == other; }
};
using KeyMapView = FlatTableView<KeyMapEntry>;

// Immutable after Build, so any number of threads may read it.
class KeyMap {
 public:
  static constexpr int64_t kMaxKeys = (int64_t{1} << 31) - 1;

  // Replaces the content.
  //   keys: [n], owned by the caller; any int64 is a legal key, of one given twice the first
  //   counts. states: [n], or nullptr: all are 0.
  // Key i gets index i. InvalidArgument for more than kMaxKeys, ResourceExhausted if there is no
  // memory for the entries; the map is then unchanged.
  Status Build(const int64_t* keys, const uint8_t* states, int64_t n) {
    if (n > kMaxKeys) {
      return InvalidArgument("a map of keys is given " + std::to_string(n) +
                             " keys; allowed: up to " + std::to_string(kMaxKeys));
    }
    const auto entry_of = [&](int64_t i) -> KeyMapEntry {
      return {keys[i], static_cast<int32_t>(i), states == nullptr ? 0u : states[i]};
    };
    return table_.Build("a map", keys, n, entry_of, &size_);
  }

  // Number of different keys.
  int64_t size() const { return size_; }

  // Valid until the next Build.
  KeyMapView view() const { return table_.view(); }

 private:
  FlatTable<KeyMapEntry> table_;
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_MAP_H_
