// Counts of keys that have no row, in little memory: a count is right, or too high.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_COUNT_FILTER_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_COUNT_FILTER_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"

namespace slipstream {

// A count-min sketch whose four counters of a key lie in one cache line (Cormode & Muthukrishnan
// 2005), of which only the smallest are raised (Estan & Varghese 2002). When as many accesses have
// come as it has counters, all are halved: what was seen long ago is forgotten (TinyLFU, Einziger
// et al. 2017). Not thread-safe.
class CountFilter {
 public:
  // Counts stop here.
  static constexpr uint32_t kMost = 255;
  // In whole cache lines. They are made with the first access.
  static constexpr int64_t kCounters = int64_t{1} << 18;

  // Counts accesses of a key; returns how many there were, with these.
  uint32_t Add(int64_t key, uint32_t accesses) {
    counters_.resize(kCounters);
    const Positions positions(key);
    const uint32_t count = std::min(kMost, Least(positions) + std::min(kMost, accesses));
    for (const int64_t position : positions.of_key) {
      counters_[position] = static_cast<uint8_t>(std::max<uint32_t>(counters_[position], count));
    }
    added_ += accesses;
    if (added_ >= kCounters) Halve();
    return count;
  }
  // How many there were.
  uint32_t Count(int64_t key) const { return counters_.empty() ? 0 : Least(Positions(key)); }

  int64_t bytes() const { return static_cast<int64_t>(counters_.capacity()); }
  // None before the first access.
  const std::vector<uint8_t>& counters() const { return counters_; }
  // Accesses since the last halving.
  int64_t added() const { return added_; }
  // counters: none, or kCounters.
  void Restore(std::vector<uint8_t> counters, int64_t added) {
    counters_ = std::move(counters);
    added_ = added;
  }

 private:
  static constexpr int64_t kLine = 64;

  // Where a key's counters are. The same everywhere.
  struct Positions {
    explicit Positions(int64_t key) {
      // The top bits of HashKey choose the shard.
      const uint64_t hash = Mix64(HashKey(key));
      const auto line = static_cast<int64_t>(ScaleHash(hash, kCounters / kLine)) * kLine;
      for (int i = 0; i < 4; ++i) {
        of_key[i] = line + static_cast<int64_t>((hash >> (6 * i)) % kLine);
      }
    }
    int64_t of_key[4];
  };

  uint32_t Least(const Positions& positions) const {
    uint32_t least = kMost;
    for (const int64_t position : positions.of_key) {
      least = std::min<uint32_t>(least, counters_[position]);
    }
    return least;
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
