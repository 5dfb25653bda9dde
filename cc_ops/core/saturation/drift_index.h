// Index of the tracked keys' drifts: (table, key) -> drift, built once a window.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_INDEX_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_INDEX_H_

#include <cstdint>
#include <limits>
#include <memory>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/memory/index_memory.h"

namespace slipstream {

// One key that an input looks up.
struct Lookup {
  int64_t key;
  int32_t table;
};

// Reads a DriftIndex's slots, which the index owns, or a copy of them in GPU memory. Linear probing
// by cache lines: most keys are in the line that probing begins with.
struct DriftIndexView {
  static constexpr float kUntracked = std::numeric_limits<float>::infinity();
  static constexpr int32_t kFree = -1;

  struct alignas(16) Slot {  // one load each on a GPU
    int64_t key = 0;
    int32_t table = kFree;
    float drift = 0.0f;
  };
  static constexpr int64_t kLine = 64 / sizeof(Slot);

  const Slot* slots = nullptr;  // [num_slots]
  int64_t num_slots = 0;        // 0 or a multiple of kLine, some of them free

  SLIPSTREAM_HOST_DEVICE static uint64_t Hash(const Lookup& lookup) {
    // The table enters before mixing: two tables may track the same key.
    return Mix64(static_cast<uint64_t>(lookup.key) + 0xd1b54a32d192ed03ULL * (lookup.table + 1));
  }
  // The first slot of the line that probing begins with.
  SLIPSTREAM_HOST_DEVICE int64_t Home(const Lookup& lookup) const {
    const auto lines = static_cast<uint64_t>(num_slots / kLine);
    return kLine * static_cast<int64_t>(ScaleHash(Hash(lookup), lines));
  }
  SLIPSTREAM_HOST_DEVICE int64_t NextLine(int64_t line) const {
    return line + kLine == num_slots ? 0 : line + kLine;
  }

  // The drift, or kUntracked.
  SLIPSTREAM_HOST_DEVICE float Find(const Lookup& lookup) const {
    return num_slots == 0 ? kUntracked : FindFrom(Home(lookup), lookup);
  }
  // The same of one whose Home is known; there are slots.
  SLIPSTREAM_HOST_DEVICE float FindFrom(int64_t home, const Lookup& lookup) const {
    for (int64_t line = home;; line = NextLine(line)) {
      // Where in a line a key is, nobody can predict: no branch between its slots.
      int64_t found = -1;
      for (int64_t i = line; i < line + kLine; ++i) {
        const bool is_it = (slots[i].key == lookup.key) & (slots[i].table == lookup.table);
        found = is_it ? i : found;
      }
      if (found >= 0) return slots[found].drift;
      // A line's free slots are its last ones; a key is no further than the first of them.
      if (slots[line + kLine - 1].table == kFree) return kUntracked;
    }
  }
};

// Any number of threads may read it, while none builds it.
class DriftIndex {
 public:
  static constexpr float kUntracked = DriftIndexView::kUntracked;

  DriftIndex() = default;
  DriftIndex(const DriftIndex&) = delete;
  DriftIndex& operator=(const DriftIndex&) = delete;

  // Replaces the content.
  //   tables, keys, drifts: [n], owned by the caller; a table is in [0, num_tables).
  // A drift that is not finite is an anomaly: its key stays untracked, so that it is
  // below no threshold. InvalidArgument for a table out of range, a negative drift or
  // a key given twice, of the first such entry; the index is then unchanged, as it is when
  // std::bad_alloc is thrown.
  //   parallel: threads share the slots; where a key lies may depend on how many they are, what is
  //     found does not.
  Status Build(int num_tables, const int32_t* tables, const int64_t* keys, const float* drifts,
               int64_t n, const Parallel& parallel = {});
  // The same in the memory that the index has, if that is neither too small nor twice what is
  // needed: pages that are new cost more time than filling them. On an error the index is empty;
  // after std::bad_alloc it may only be rebuilt.
  Status Rebuild(int num_tables, const int32_t* tables, const int64_t* keys, const float* drifts,
                 int64_t n, const Parallel& parallel = {});

  // Of entry i, the errors of Build but for keys that are given twice.
  static Status Check(int num_tables, const int32_t* tables, const float* drifts, int64_t i);

  void Swap(DriftIndex* other);

  int64_t size() const { return size_; }

  // The drift, or kUntracked.
  float Find(const Lookup& lookup) const { return view().Find(lookup); }
  // The same of lookups [n], drifts [n]; faster, as it asks for memory ahead.
  void Find(const Lookup* lookups, int64_t n, float* drifts) const;

  // Valid until the next Build or Rebuild.
  DriftIndexView view() const { return {slots_, num_slots_}; }

 private:
  // Slots [begin, end) of one task: keys whose lines are in it go there.
  struct Part;
  void MakeSlots(int64_t number);
  void Fill(int num_tables, const int32_t* tables, const int64_t* keys, const float* drifts,
            int64_t n, Part* part);

  std::unique_ptr<IndexMemory> memory_;  // of the slots
  // A quarter or more of them is free: probes stay short and end.
  DriftIndexView::Slot* slots_ = nullptr;
  int64_t capacity_ = 0;  // slots that there is memory for
  int64_t num_slots_ = 0;
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_INDEX_H_
