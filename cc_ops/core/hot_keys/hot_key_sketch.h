// The most accessed keys among any number of them, in a fixed amount of memory: an access sketch
// whose counters each remember a key.
#ifndef SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_H_
#define SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_H_

#include <cstdint>
#include <limits>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/hot_keys/access_sketch.h"

namespace slipstream {

// A view: nothing is owned. A counter belongs to the key with the highest estimate among those that
// came to it lately; a key is forgotten only where such keys took all of its counters. Of keys that
// are accessed more often than a counter is by others (n / w times, of n accesses and w counters a
// row), that happens to the r-th hottest with a probability of about (r / w) ^ kRows; rarer ones
// are not told apart.
struct HotKeySketch {
  // No key; it is counted, but never remembered.
  static constexpr int64_t kNobody = std::numeric_limits<int64_t>::min();
  // Most keys of one batch.
  static constexpr int64_t kMaxBatch = (int64_t{1} << 32) - 1;

  AccessSketch sketch;
  int64_t* owners;       // [sketch.NumCounters()], kNobody at the start
  uint64_t* challenges;  // [sketch.NumCounters()], 0 between batches

  // What key i of a batch claims its counters with: the highest claim wins, of equals the first.
  // Never 0.
  SLIPSTREAM_HOST_DEVICE static uint64_t ClaimOf(int64_t estimate, int64_t i) {
    constexpr int64_t kMost = 0xffffffff;
    const auto bounded = static_cast<uint64_t>(estimate < kMost ? estimate : kMost);
    return (bounded << 32) | static_cast<uint64_t>(kMost - i);
  }

  // Whether a key takes a counter over that it has won in its batch.
  SLIPSTREAM_HOST_DEVICE bool TakesOver(int64_t owner, int64_t estimate) const {
    return owner == kNobody || sketch.Estimate(owner) < estimate;
  }
};

// Counts a batch's accesses. The result depends on the order within the batch only where estimates
// are equal, and not on that of threads.
//   keys:    [n], up to kMaxBatch; one given twice counts twice.
//   counts:  [n], whether a key counts (padding does not); nullptr: all do.
//   unit:    what an access adds to estimates, from 1.
void CountAccesses(const HotKeySketch& hot, const int64_t* keys, const bool* counts, int64_t n,
                   int64_t unit);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_H_
