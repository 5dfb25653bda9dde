// Index of the tracked keys' drifts: (table, key) -> drift, built once a window.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_INDEX_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_INDEX_H_

#include <cstdint>
#include <limits>
#include <utility>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/flat_table.h"

namespace slipstream {

// One key that an input looks up.
struct Lookup {
  int64_t key;
  int32_t table;
};

// Probed by cache lines: most keys are in the line that probing begins with.
struct alignas(16) DriftEntry {
  using Key = Lookup;
  static constexpr int64_t kLine = 4;
  static constexpr int32_t kFree = -1;
  static constexpr float kUntracked = std::numeric_limits<float>::infinity();

  int64_t key = 0;
  int32_t table = kFree;
  float drift = kUntracked;

  SLIPSTREAM_HOST_DEVICE static uint64_t Hash(const Lookup& lookup, uint64_t seed) {
    // The table enters before mixing: two tables may track the same key.
    return Mix64((static_cast<uint64_t>(lookup.key) ^ seed) +
                 0xd1b54a32d192ed03ULL * (static_cast<uint64_t>(lookup.table) + 1));
  }
  SLIPSTREAM_HOST_DEVICE bool is_free() const { return table == kFree; }
  // Tables that are looked up are from 0.
  SLIPSTREAM_HOST_DEVICE bool Is(const Lookup& lookup) const {
    return (key == lookup.key) & (table == lookup.table);
  }
};
using DriftIndexView = FlatTableView<DriftEntry>;

// Any number of threads may read it, while none builds it.
class DriftIndex {
 public:
  static constexpr float kUntracked = DriftEntry::kUntracked;

  // Replaces the content.
  //   tables, keys, drifts: [n], owned by the caller; a table is in [0, num_tables).
  // A drift that is not finite is an anomaly: its key stays untracked, so that it is
  // below no threshold. InvalidArgument for a table out of range, a negative drift or
  // a key given twice, of the first such entry; the index is then unchanged, as it is when
  // std::bad_alloc is thrown.
  //   parallel: threads share the entries; where a key lies may depend on how many they are, what
  //   is
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

  void Swap(DriftIndex* other) { std::swap(*this, *other); }

  int64_t size() const { return size_; }

  // Of lookups [n], drifts [n]: the drift, or kUntracked. Asks for memory ahead.
  void Find(const Lookup* lookups, int64_t n, float* drifts) const;

  // Valid until the next Build or Rebuild.
  DriftIndexView view() const { return table_.view(); }

 private:
  FlatTable<DriftEntry> table_;  // a quarter or more is free: probes stay short and end
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_INDEX_H_
