// Where a key is in a list, and its state: e.g. the copies of frozen rows, or the states of a
// table's keys. Built once a window, probed every step.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_MAP_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_MAP_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"

namespace slipstream {

// Reads a KeyMap's slots, which the map owns, or a copy of them in GPU memory.
//
// Hashed rather than sorted: a key costs one or two reads of 32 bytes, which is what a GPU fetches
// at least, where a binary search among a million keys waits for twenty reads, each for the other.
struct KeyMapView {
  static constexpr int32_t kNowhere = -1;

  // 16 bytes, so that one load gets all of it.
  struct alignas(16) Slot {
    int64_t key = 0;
    int32_t place = kNowhere;  // kNowhere: the slot is free
    uint32_t state = 0;
  };

  const Slot* slots = nullptr;  // [num_slots]
  int64_t num_slots = 0;        // 0 or a power of two

  // The key's slot; a free one if it is not in the map.
  SLIPSTREAM_HOST_DEVICE Slot Find(int64_t key) const {
    if (num_slots == 0) return Slot();
    const uint64_t mask = static_cast<uint64_t>(num_slots) - 1;
    for (uint64_t i = HashKey(key) & mask;; i = (i + 1) & mask) {
      const Slot slot = slots[i];
      if (slot.key == key || slot.place == kNowhere) return slot;
    }
  }
};

// Open addressing with linear probing. Immutable after Build, so any number of threads may read it.
class KeyMap {
 public:
  static constexpr int64_t kMaxKeys = (int64_t{1} << 31) - 1;

  // Replaces the content.
  //   keys: [n], owned by the caller; any int64 is a legal key, of one given twice the first
  //   counts. states: [n], or nullptr: all are 0.
  // Key i gets place i. InvalidArgument for more than kMaxKeys, ResourceExhausted if there is no
  // memory for the slots; the map is then unchanged.
  Status Build(const int64_t* keys, const uint8_t* states, int64_t n);

  // Number of different keys.
  int64_t size() const { return size_; }

  // Valid until the next Build.
  KeyMapView view() const { return {slots_.data(), static_cast<int64_t>(slots_.size())}; }

 private:
  std::vector<KeyMapView::Slot> slots_;  // at least twice the keys: probes stay short and end
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_MAP_H_
