#include "cc_ops/core/hot_keys/hot_key_sketch.h"

#include <algorithm>

namespace slipstream {

void CountAccesses(const HotKeySketch& hot, const int64_t* keys, const bool* counts, int64_t n,
                   int64_t unit) {
  const AccessSketch& sketch = hot.sketch;
  const auto is_counted = [&](int64_t i) { return counts == nullptr || counts[i]; };
  for (int64_t i = 0; i < n; ++i) {
    if (!is_counted(i)) continue;
    for (int row = 0; row < AccessSketch::kRows; ++row) *sketch.Counter(row, keys[i]) += unit;
  }
  // After all accesses were counted, so that a key has the same estimate at each of its positions.
  for (int64_t i = 0; i < n; ++i) {
    if (!is_counted(i) || keys[i] == HotKeySketch::kNoOwner) continue;
    const uint64_t claim = HotKeySketch::ClaimOf(sketch.Estimate(keys[i]), i);
    for (int row = 0; row < AccessSketch::kRows; ++row) {
      uint64_t* const challenge = hot.challenges + (sketch.Counter(row, keys[i]) - sketch.counters);
      *challenge = std::max(*challenge, claim);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (!is_counted(i) || keys[i] == HotKeySketch::kNoOwner) continue;
    const int64_t estimate = sketch.Estimate(keys[i]);
    for (int row = 0; row < AccessSketch::kRows; ++row) {
      const int64_t counter = sketch.Counter(row, keys[i]) - sketch.counters;
      if (hot.challenges[counter] != HotKeySketch::ClaimOf(estimate, i)) continue;
      if (hot.TakesOver(hot.owners[counter], estimate)) hot.owners[counter] = keys[i];
      hot.challenges[counter] = 0;
    }
  }
}

}  // namespace slipstream
