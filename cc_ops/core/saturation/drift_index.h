// Index of the drifts of tracked keys: (table, key) -> drift. It is built once per window.
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

// A key that an example looks up.
struct Lookup {
  int64_t key;
  int32_t table;
};

// An entry of the hash table: a tracked key and its drift. The table is searched by cache lines;
// most keys are in the first line.
struct alignas(16) DriftEntry {
  using Key = Lookup;
  static constexpr int64_t kLine = 4;
  static constexpr int32_t kFree = -1;  // Table of a free entry.
  // Drift of keys that are not tracked.
  static constexpr float kUntracked = std::numeric_limits<float>::infinity();

  int64_t key = 0;
  int32_t table = kFree;
  float drift = kUntracked;

  SLIPSTREAM_HOST_DEVICE static uint64_t Hash(const Lookup& lookup, uint64_t seed) {
    // Hash the table, too, because two tables may track the same key.
    return Mix64((static_cast<uint64_t>(lookup.key) ^ seed) +
                 0xd1b54a32d192ed03ULL * (static_cast<uint64_t>(lookup.table) + 1));
  }
  SLIPSTREAM_HOST_DEVICE bool is_free() const { return table == kFree; }
  // The table of a lookup is at least 0, therefore free entries do not match.
  SLIPSTREAM_HOST_DEVICE bool Is(const Lookup& lookup) const {
    return (key == lookup.key) & (table == lookup.table);
  }
};
using DriftIndexView = FlatTableView<DriftEntry>;

// Safe to read from any number of threads while no thread builds it.
class DriftIndex {
 public:
  static constexpr float kUntracked = DriftEntry::kUntracked;

  // Replaces the contents. tables, keys, drifts: [n], owned by the caller; tables are in [0,
  // num_tables). A drift that is not finite is an anomaly: its key stays untracked, so that it is
  // below no threshold.
  //
  // Returns InvalidArgument for the first entry with a table out of range, a negative drift or a
  // repeated key. The index is unchanged then, and if std::bad_alloc is thrown. The number of
  // threads may change the position of entries, but not the results of lookups.
  Status Build(int num_tables, const int32_t* tables, const int64_t* keys, const float* drifts,
               int64_t n, const Parallel& parallel = {});
  // Same, but reuses the memory of the index, unless it is too small or at least twice the needed
  // size, because allocating fresh pages takes longer than filling them. After an error the index
  // is empty. After std::bad_alloc only Build and Rebuild may be called.
  Status Rebuild(int num_tables, const int32_t* tables, const int64_t* keys, const float* drifts,
                 int64_t n, const Parallel& parallel = {});

  // Returns InvalidArgument if Build would reject entry i because of its table or drift.
  static Status Check(int num_tables, const int32_t* tables, const float* drifts, int64_t i);

  void Swap(DriftIndex* other) { std::swap(*this, *other); }

  int64_t size() const { return size_; }  // Number of tracked keys.

  // Writes the drift of each of the lookups [n], or kUntracked, to `drifts` ([n]).
  void Find(const Lookup* lookups, int64_t n, float* drifts) const;

  // Valid until the next Build or Rebuild.
  DriftIndexView view() const { return table_.view(); }

 private:
  FlatTable<DriftEntry> table_;  // At least a quarter is free, so that probes are short.
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_INDEX_H_
