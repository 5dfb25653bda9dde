#include "cc_ops/core/containers/key_map.h"

#include <new>
#include <string>
#include <utility>

namespace slipstream {

Status KeyMap::Build(const int64_t* keys, const uint8_t* states, int64_t n) {
  if (n > kMaxKeys) {
    return InvalidArgument("a map of keys is given " + std::to_string(n) +
                           " keys; allowed: up to " + std::to_string(kMaxKeys));
  }
  KeyMap built;
  if (n > 0) {
    uint64_t capacity = 16;
    while (capacity < 2 * static_cast<uint64_t>(n)) capacity *= 2;
    try {
      built.slots_.resize(capacity);
    } catch (const std::bad_alloc&) {
      return ResourceExhausted("a map of " + std::to_string(n) + " keys needs " +
                               std::to_string(capacity * sizeof(KeyMapView::Slot)) +
                               " bytes, which cannot be allocated");
    }
  }
  const uint64_t mask = built.slots_.size() - 1;
  for (int64_t i = 0; i < n; ++i) {
    uint64_t home = HashKey(keys[i]) & mask;
    while (built.slots_[home].place != KeyMapView::kNowhere && built.slots_[home].key != keys[i]) {
      home = (home + 1) & mask;
    }
    if (built.slots_[home].place != KeyMapView::kNowhere) continue;
    built.slots_[home] = {keys[i], static_cast<int32_t>(i), states == nullptr ? 0u : states[i]};
    ++built.size_;
  }
  *this = std::move(built);
  return OkStatus();
}

}  // namespace slipstream
