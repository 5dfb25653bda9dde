// Finds the most accessed among any number of keys in a fixed amount of memory.
//
// The structure is an access sketch in which each counter also remembers one key, its owner. The
// owner is the key with the highest estimate among the recent keys of the counter. A key is
// forgotten only if other keys took all of its counters.
//
// With n accesses and w counters per row, a counter receives about n / w accesses of other keys. A
// key that is accessed more often than that, and is the r-th hottest, is forgotten with a
// probability of about (r / w) ^ kRows. Rarer keys cannot be distinguished.
#ifndef SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_H_
#define SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_H_

#include <cstdint>
#include <limits>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/hot_keys/access_sketch.h"

namespace slipstream {

// A view of arrays that the caller owns.
struct HotKeySketch {
  // Not a key. Its accesses are counted, but it is never an owner.
  static constexpr int64_t kNobody = std::numeric_limits<int64_t>::min();
  // Maximum number of keys in a batch.
  static constexpr int64_t kMaxBatch = (int64_t{1} << 32) - 1;

  AccessSketch sketch;
  int64_t* owners;       // [sketch.NumCounters()]; initially kNobody.
  uint64_t* challenges;  // [sketch.NumCounters()]; 0 between batches.

  // Returns the claim of key i of a batch for its counters. The highest claim wins; of equal
  // estimates, the first key. Never 0.
  SLIPSTREAM_HOST_DEVICE static uint64_t ClaimOf(int64_t estimate, int64_t i) {
    constexpr int64_t kMost = 0xffffffff;
    const auto bounded = static_cast<uint64_t>(estimate < kMost ? estimate : kMost);
    return (bounded << 32) | static_cast<uint64_t>(kMost - i);
  }

  // Whether a key takes over a counter that it won in its batch.
  SLIPSTREAM_HOST_DEVICE bool TakesOver(int64_t owner, int64_t estimate) const {
    return owner == kNobody || sketch.Estimate(owner) < estimate;
  }
};

// Counts the accesses of a batch. The result does not depend on the order of threads, and on the
// order within the batch only for equal estimates.
//
//   keys:    [n], at most kMaxBatch; a repeated key counts repeatedly.
//   counts:  [n], whether a key counts (padding does not); null means that all count.
//   unit:    Increment of the estimates per access, at least 1.
void CountAccesses(const HotKeySketch& hot, const int64_t* keys, const bool* counts, int64_t n,
                   int64_t unit);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_H_
