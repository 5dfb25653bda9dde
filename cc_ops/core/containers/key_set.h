// A set of keys, for example the saturated keys of a table. It is built once per window and probed
// at every step.
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

// An entry of the hash table of a KeySet.
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

// Reads the keys of a KeySet, or of its copy in GPU memory. KeySetEntry::kFree marks free entries
// but is a valid key, too. Therefore `has_free_key` stores whether it is in the set.
struct KeySetView : FlatTableView<KeySetEntry> {
  bool has_free_key = false;

  bool is_empty() const { return capacity == 0 && !has_free_key; }
  SLIPSTREAM_HOST_DEVICE bool Contains(int64_t key) const {
    return key == KeySetEntry::kFree ? has_free_key : !Find(key).is_free();
  }
};

// Immutable after Build, therefore safe to read from any number of threads.
class KeySet {
 public:
  // Replaces the contents. keys: [n], owned by the caller; any int64 is valid, and repeats count
  // once. Returns ResourceExhausted if the allocation fails; the set is unchanged then.
  Status Build(const int64_t* keys, int64_t n) {
    const auto entry_of = [&](int64_t i) -> KeySetEntry { return {keys[i]}; };
    const Status status = table_.Build("a key set", keys, n, entry_of, &size_);
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
