// Index of the tracked keys' drifts: (table, key) -> drift, built once a window.
#ifndef SLIPSTREAM_CC_OPS_CORE_DRIFT_INDEX_H_
#define SLIPSTREAM_CC_OPS_CORE_DRIFT_INDEX_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/hash.h"
#include "cc_ops/core/host_device.h"
#include "cc_ops/core/status.h"

namespace slipstream {

// One key that an input looks up.
struct Lookup {
  int64_t key;
  int32_t table;
};

// Reads a DriftIndex's slots, which the index owns, or a copy of them in GPU memory.
struct DriftIndexView {
  static constexpr float kUntracked = std::numeric_limits<float>::infinity();
  static constexpr int32_t kFree = -1;

  struct alignas(16) Slot {  // four to a cache line, one load each on a GPU
    int64_t key = 0;
    int32_t table = kFree;
    float drift = 0.0f;
  };

  const Slot* slots = nullptr;  // [num_slots]
  int64_t num_slots = 0;        // 0 or a power of two

  SLIPSTREAM_HOST_DEVICE uint64_t mask() const { return static_cast<uint64_t>(num_slots) - 1; }

  SLIPSTREAM_HOST_DEVICE uint64_t Home(const Lookup& lookup) const {
    // The table enters before mixing: two tables may track the same key.
    return Mix64(static_cast<uint64_t>(lookup.key) + 0xd1b54a32d192ed03ULL * (lookup.table + 1)) &
           mask();
  }

  // The drift, or kUntracked.
  SLIPSTREAM_HOST_DEVICE float Find(const Lookup& lookup) const {
    if (num_slots == 0) return kUntracked;
    for (uint64_t i = Home(lookup);; i = (i + 1) & mask()) {
      const Slot slot = slots[i];
      if (slot.table == kFree) return kUntracked;
      if (slot.key == lookup.key && slot.table == lookup.table) return slot.drift;
    }
  }
};

// Immutable after Build, so any number of threads may read it.
class DriftIndex {
 public:
  static constexpr float kUntracked = DriftIndexView::kUntracked;

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
    if (!slots_.empty()) __builtin_prefetch(&slots_[view().Home(lookup)]);
  }

  // The drift, or kUntracked.
  float Find(const Lookup& lookup) const { return view().Find(lookup); }

  // Valid until the next Build.
  DriftIndexView view() const { return {slots_.data(), static_cast<int64_t>(slots_.size())}; }

 private:
  // A power of two, at least twice the keys: probes stay short and end.
  std::vector<DriftIndexView::Slot> slots_;
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DRIFT_INDEX_H_
