#include "cc_ops/core/containers/key_set.h"

#include <new>
#include <string>
#include <utility>

namespace slipstream {

Status KeySet::Build(const int64_t* keys, int64_t n) {
  KeySet built;
  if (n > 0) {
    uint64_t capacity = 16;
    while (capacity < 2 * static_cast<uint64_t>(n)) capacity *= 2;
    try {
      built.slots_.resize(capacity, KeySetView::kFree);
    } catch (const std::bad_alloc&) {
      return ResourceExhausted("a set of " + std::to_string(n) + " keys needs " +
                               std::to_string(capacity * sizeof(int64_t)) +
                               " bytes, which cannot be allocated");
    }
  }
  const uint64_t mask = built.slots_.size() - 1;
  for (int64_t i = 0; i < n; ++i) {
    if (keys[i] == KeySetView::kFree) {
      built.size_ += built.has_free_key_ ? 0 : 1;
      built.has_free_key_ = true;
      continue;
    }
    uint64_t slot = HashKey(keys[i]) & mask;
    while (built.slots_[slot] != KeySetView::kFree && built.slots_[slot] != keys[i]) {
      slot = (slot + 1) & mask;
    }
    built.size_ += built.slots_[slot] == keys[i] ? 0 : 1;
    built.slots_[slot] = keys[i];
  }
  *this = std::move(built);
  return OkStatus();
}

}  // namespace slipstream
