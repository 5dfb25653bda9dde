// A count-min sketch of accesses (Cormode and Muthukrishnan, 2005).
//
// It estimates the access counts of any number of keys in a fixed amount of memory. The counters
// form a matrix with kRows rows (unrelated to embedding rows). Each key has one counter per row,
// which it shares with other keys. The smallest of its counters is the estimate, which is never too
// low, except for rounding when counts decay.
//
// This file reads and decays the counters. CountAccesses (hot_key_sketch.h) increments them.
#ifndef SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_H_
#define SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_H_

#include <cstdint>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"

namespace slipstream {

// A view of counters that the caller owns, initially 0. Counters are integers, so that sums do not
// depend on the order in which threads add. Note: conservative update (incrementing only the
// smallest counters of a key) would reduce the error, but its result depends on the order.
struct AccessSketch {
  static constexpr int kRows = 4;
  static constexpr int kMaxLog2Width = 30;

  int64_t* counters;  // [kRows, 1 << log2_width]; each in [0, 2^63 - 1].
  int log2_width;     // In [1, kMaxLog2Width].

  SLIPSTREAM_HOST_DEVICE int64_t NumCounters() const { return int64_t{kRows} << log2_width; }

  // Returns the counter of a key in `row`, which is in [0, kRows).
  SLIPSTREAM_HOST_DEVICE int64_t* Counter(int row, int64_t key) const {
    const uint64_t hash = Mix64(HashKey(key) + static_cast<uint64_t>(row));
    return counters + (int64_t{row} << log2_width) +
           static_cast<int64_t>(hash >> (64 - log2_width));
  }

  // Returns the smallest counter of a key: its accesses, plus the accesses of the other keys that
  // share this counter.
  SLIPSTREAM_HOST_DEVICE int64_t Estimate(int64_t key) const {
    int64_t lowest = *Counter(0, key);
    for (int row = 1; row < kRows; ++row) {
      const int64_t count = *Counter(row, key);
      lowest = count < lowest ? count : lowest;
    }
    return lowest;
  }
};

// Decay factors are in [0, 1], in units of 2^-32, so that they are the same on every device.
constexpr uint64_t kNoDecay = uint64_t{1} << 32;

// Returns count * factor / kNoDecay, rounded down. factor: at most kNoDecay.
SLIPSTREAM_HOST_DEVICE inline int64_t Decayed(int64_t count, uint64_t factor) {
  const uint64_t high = static_cast<uint64_t>(count) >> 32;
  const uint64_t low = static_cast<uint64_t>(count) & 0xffffffffu;
  return static_cast<int64_t>(high * factor + ((low * factor) >> 32));
}

// Multiplies all counters by factor / kNoDecay, at most 1. Results are rounded down. Pass a large
// `unit` (the increment per access) to CountAccesses if fractions of an access must not be lost.
void DecayAccesses(const AccessSketch& sketch, uint64_t factor);

// Estimates the accesses of keys [n]. estimates: [n], owned by the caller.
void EstimateAccesses(const AccessSketch& sketch, const int64_t* keys, int64_t n,
                      int64_t* estimates);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_H_
