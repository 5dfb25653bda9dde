// Index of the tracked keys' drifts: (table, key) -> drift, built once a window.
#ifndef SLIPSTREAM_CC_OPS_CORE_DRIFT_INDEX_H_
#define SLIPSTREAM_CC_OPS_CORE_DRIFT_INDEX_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/hash.h"
#include "cc_ops/core/status.h"

namespace slipstream {

// One key that an input looks up.
struct Lookup {
  int64_t key;
  int32_t table;
};

// Immutable after Build, so any number of threads may read it.
class DriftIndex {
 public:
  static constexpr float kUntracked = std::numeric_limits<float>::infinity();

  // Replaces the content.
  //   tables, keys, drifts: [n], owned by the caller; a table is in [0, num_tables).
  // A drift that is not finite is an anomaly: its key stays untracked, so that it is
  // below no threshold. InvalidArgument for a table out of range, a negative drift or
  // a key given twice; the index is then unchanged.
  Status Build(int num_tables, const int32_t* tables, const int64_t* keys, const float* drifts,
               int64_t n);

  int64_t size() const { return size_; }

  // Asks for the cache line that Find will read.
  void Prefetch(const Lookup& lookup) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[Home(lookup.table, lookup.key)]);
  }

  // The drift, or kUntracked.
  float Find(const Lookup& lookup) const {
    if (slots_.empty()) return kUntracked;
    for (uint64_t i = Home(lookup.table, lookup.key);; i = (i + 1) & mask_) {
      const Slot& slot = slots_[i];
      if (slot.table == kFree) return kUntracked;
      if (slot.key == lookup.key && slot.table == lookup.table) return slot.drift;
    }
  }

 private:
  static constexpr int32_t kFree = -1;
  struct Slot {  // 16 bytes, four to a cache line
    int64_t key = 0;
    int32_t table = kFree;
    float drift = 0.0f;
  };

  uint64_t Home(int32_t table, int64_t key) const {
    // The table enters before mixing: two tables may track the same key.
    return Mix64(static_cast<uint64_t>(key) + 0xd1b54a32d192ed03ULL * (table + 1)) & mask_;
  }

  std::vector<Slot> slots_;  // a power of two, at least twice the keys: probes stay short and end
  uint64_t mask_ = 0;
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DRIFT_INDEX_H_
