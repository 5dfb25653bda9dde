// Finds the most accessed among any number of keys in a fixed amount of memory.
//
// The structure is an AccessSketch in which each counter also stores one key, its owner. A key
// becomes the owner of a counter when its estimate is higher than the estimate of the current
// owner. The owners are the candidates for the most accessed keys. A key is lost as a candidate
// only if other keys own all of its counters.
//
// With n accesses and w counters per sketch row, a counter receives about n / w accesses of other
// keys. A key that is accessed more often than that, and is the r-th hottest, is lost with a
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
  // Marks a counter without an owner. If a batch contains this number as a key, its accesses are
  // counted, but it never becomes an owner.
  static constexpr int64_t kNoOwner = std::numeric_limits<int64_t>::min();
  // Maximum number of keys in a batch.
  static constexpr int64_t kMaxBatch = (int64_t{1} << 32) - 1;

  AccessSketch sketch;
  int64_t* owners;  // [sketch.NumCounters()]; initially kNoOwner.
  // [sketch.NumCounters()]; the highest claim to each counter in a batch, 0 between batches.
  uint64_t* challenges;

  // Returns the claim of key i of a batch to its counters. Of all keys in the batch that have a
  // counter, the key with the highest claim may become its owner: the key with the highest
  // estimate, or the first of them if estimates are equal. Estimates above 2^32 - 1 count as equal.
  // Never 0.
  SLIPSTREAM_HOST_DEVICE static uint64_t ClaimOf(int64_t estimate, int64_t i) {
    constexpr int64_t kMax = 0xffffffff;
    const auto bounded = static_cast<uint64_t>(estimate < kMax ? estimate : kMax);
    return (bounded << 32) | static_cast<uint64_t>(kMax - i);
  }

  // Whether the key with the highest claim to a counter becomes its owner. owner: the current
  // owner. estimate: of the key.
  SLIPSTREAM_HOST_DEVICE bool TakesOver(int64_t owner, int64_t estimate) const {
    return owner == kNoOwner || sketch.Estimate(owner) < estimate;
  }
};

// Counts the accesses of a batch and updates the owners. The result does not depend on the order of
// threads. It depends on the order of keys within the batch only if estimates are equal.
//
//   keys:    [n], n at most kMaxBatch; a repeated key counts repeatedly.
//   counts:  [n], whether a key counts (padding does not); null means that all count.
//   unit:    Increment of a counter per access, at least 1.
void CountAccesses(const HotKeySketch& hot, const int64_t* keys, const bool* counts, int64_t n,
                   int64_t unit);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_H_
