// Approximate access counts of keys, for the admission of keys that have no row.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_COUNT_FILTER_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_COUNT_FILTER_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"

namespace slipstream {

// A count-min sketch (Cormode & Muthukrishnan 2005) with conservative update (Estan & Varghese
// 2002). The count of a key is the smallest of its four counters, which are in one cache line and
// may be shared with other keys. It may be too high, but never too low since the last halving.
// After as many accesses as there are counters, all counters are halved, so that old accesses fade
// (TinyLFU, Einziger et al. 2017). Not thread-safe.
class CountFilter {
 public:
  // Maximum count; larger counts are stored as this one.
  static constexpr uint32_t kMax = 255;
  // Number of counters of one byte. They are allocated at the first access.
  static constexpr int64_t kCounters = int64_t{1} << 18;

  // Adds accesses of a key and returns its new count.
  uint32_t Add(int64_t key, uint32_t accesses) {
    counters_.resize(kCounters);
    const Positions positions(key);
    const uint32_t count = std::min(kMax, Smallest(positions) + std::min(kMax, accesses));
    for (const int64_t position : positions.of_key) {
      counters_[position] = static_cast<uint8_t>(std::max<uint32_t>(counters_[position], count));
    }
    added_ += accesses;
    if (added_ >= kCounters) Halve();
    return count;
  }
  // Returns the count of a key; 0 if it was never added.
  uint32_t Count(int64_t key) const { return counters_.empty() ? 0 : Smallest(Positions(key)); }

  int64_t bytes() const { return static_cast<int64_t>(counters_.capacity()); }
  // [kCounters], for a checkpoint; empty before the first access.
  const std::vector<uint8_t>& counters() const { return counters_; }
  // Number of accesses since the last halving.
  int64_t added() const { return added_; }
  // Replaces the state by the results of counters() and added(). counters: empty or [kCounters].
  void Restore(std::vector<uint8_t> counters, int64_t added) {
    counters_ = std::move(counters);
    added_ = added;
  }

 private:
  static constexpr int64_t kLine = 64;

  // Positions of the counters of a key; the same in every process.
  struct Positions {
    explicit Positions(int64_t key) {
      // Hash again, because the top bits of HashKey choose the shard.
      const uint64_t hash = Mix64(HashKey(key));
      const auto line = static_cast<int64_t>(ScaleHash(hash, kCounters / kLine)) * kLine;
      for (int i = 0; i < 4; ++i) {
        of_key[i] = line + static_cast<int64_t>((hash >> (6 * i)) % kLine);
      }
    }
    int64_t of_key[4];
  };

  uint32_t Smallest(const Positions& positions) const {
    uint32_t minimum = kMax;
    for (const int64_t position : positions.of_key) {
      minimum = std::min<uint32_t>(minimum, counters_[position]);
    }
    return minimum;
  }

  void Halve() {
    for (uint8_t& counter : counters_) counter = static_cast<uint8_t>(counter / 2);
    added_ = 0;
  }

  std::vector<uint8_t> counters_;
  int64_t added_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_COUNT_FILTER_H_
