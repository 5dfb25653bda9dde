// A set of keys, e.g. the saturated ones of a table: built once a window, probed every step.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_SET_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_SET_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"

namespace slipstream {

// Reads a KeySet's slots, which the set owns, or a copy of them in GPU memory.
struct KeySetView {
  // Marks a free slot. It is a legal key too: whether it is in the set stands beside the slots.
  static constexpr int64_t kFree = std::numeric_limits<int64_t>::min();

  const int64_t* slots = nullptr;  // [num_slots]
  int64_t num_slots = 0;           // 0 or a power of two
  bool has_free_key = false;

  SLIPSTREAM_HOST_DEVICE bool Contains(int64_t key) const {
    if (key == kFree) return has_free_key;
    if (num_slots == 0) return false;
    const uint64_t mask = static_cast<uint64_t>(num_slots) - 1;
    for (uint64_t i = HashKey(key) & mask;; i = (i + 1) & mask) {
      const int64_t slot = slots[i];
      if (slot == key) return true;
      if (slot == kFree) return false;
    }
  }
};

// Open addressing with linear probing, 8 bytes a slot. Immutable after Build, so any number of
// threads may read it.
class KeySet {
 public:
  // Replaces the content.
  //   keys: [n], owned by the caller; any int64 is a legal key, and one given twice counts once.
  // ResourceExhausted if there is no memory for the slots; the set is then unchanged.
  Status Build(const int64_t* keys, int64_t n);

  int64_t size() const { return size_; }
  bool Contains(int64_t key) const { return view().Contains(key); }

  // Valid until the next Build.
  KeySetView view() const {
    return {slots_.data(), static_cast<int64_t>(slots_.size()), has_free_key_};
  }

 private:
  std::vector<int64_t> slots_;  // at least twice the keys: probes stay short and end
  int64_t size_ = 0;
  bool has_free_key_ = false;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_SET_H_
