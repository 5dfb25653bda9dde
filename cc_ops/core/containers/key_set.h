// A set of keys, e.g. the saturated ones of a table: built once a window, probed every step.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_SET_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_SET_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/flat_table.h"

namespace slipstream {

struct KeySetEntry {
  using Key = int64_t;
  static constexpr int64_t kLine = 1;
  static constexpr int64_t kFree = std::numeric_limits<int64_t>::min();

  int64_t key = kFree;

  SLIPSTREAM_HOST_DEVICE static uint64_t Hash(int64_t key, uint64_t seed) {
    return KeyedHash(key, seed);
  }
  SLIPSTREAM_HOST_DEVICE bool is_free() const { return key == kFree; }
  SLIPSTREAM_HOST_DEVICE bool Is(int64_t other) const { return key == other; }
};

// What marks a free entry is a legal key, too: whether it is in the set stands beside the entries.
struct KeySetView : FlatTableView<KeySetEntry> {
  bool has_free_key = false;

  bool is_empty() const { return capacity == 0 && !has_free_key; }
  SLIPSTREAM_HOST_DEVICE bool Contains(int64_t key) const {
    return key == KeySetEntry::kFree ? has_free_key : !Find(key).is_free();
  }
};

// Immutable after Build, so any number of threads may read it.
class KeySet {
 public:
  // Replaces the content.
  //   keys: [n], owned by the caller; any int64 is a legal key, and one given twice counts once.
  // ResourceExhausted if there is no memory for the entries; the set is then unchanged.
  Status Build(const int64_t* keys, int64_t n) {
    const auto entry_of = [&](int64_t i) -> KeySetEntry { return {keys[i]}; };
    const Status status = table_.Build("a set", keys, n, entry_of, &size_);
    if (status.ok()) has_free_key_ = std::count(keys, keys + n, KeySetEntry::kFree) > 0;
    return status;
  }

  int64_t size() const { return size_ + (has_free_key_ ? 1 : 0); }
  bool Contains(int64_t key) const { return view().Contains(key); }

  // Valid until the next Build.
  KeySetView view() const { return {table_.view(), has_free_key_}; }

 private:
  FlatTable<KeySetEntry> table_;
  int64_t size_ = 0;
  bool has_free_key_ = false;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_SET_H_
