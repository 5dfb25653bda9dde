// Finds or creates the rows of a batch's keys, once per distinct key.
//
// The keys are sorted into buckets, one per table and shard (lookup_plan.h). Each function
// processes the buckets [first, last). To deliver a row means to copy it to the output of its
// feature, or to store a pointer to it for the pooling of its feature (RowTargets).
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_RESOLVE_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_RESOLVE_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/lookup/lookup_plan.h"

namespace slipstream {

// Destination of a feature's pooled vectors: the vector of example i starts at data + i * stride
// and has the dimension of the feature's table.
struct PooledOutput {
  float* data = nullptr;
  int64_t stride = 0;
};

// Destinations of the rows that are found.
struct RowTargets {
  // [features]. The output of a feature with one unweighted key per example, where each vector is a
  // row. For features that are pooled, `data` is null.
  std::vector<PooledOutput> copied;
  // The row at each key position (Positions in key_sort.h) of the pooled features; null if there
  // are none.
  std::vector<const float*>* row_of_position = nullptr;
  // Room for float copies of rows that are not stored as floats, or that may be absent: [keys of
  // the plan, copy_dim].
  float* copies = nullptr;
  int64_t copy_dim = 0;
};

// Counts accesses, creates missing rows in the order in which their keys appear, fills the entries
// of the plan and delivers the rows. No other thread may touch the shards of these buckets. Throws
// std::bad_alloc; the tables stay consistent.
void ResolveBuckets(const SortedKeys& sorted, int64_t first, int64_t last,
                    const RowTargets& targets, ResolveScratch* scratch, LookupPlan* plan);

// Same without delivering rows. A row on disk is counted as accessed but is null in the plan; the
// caller loads the row and sets the pointer. A key without a row also has a null row, and the index
// HashIndex::kEmpty.
void FindBuckets(const SortedKeys& sorted, int64_t first, int64_t last, ResolveScratch* scratch,
                 LookupPlan* plan);
// Fills the plan's entries without looking for rows. The caller sets the rows before
// DeliverBuckets.
void GroupBuckets(const SortedKeys& sorted, int64_t first, int64_t last, ResolveScratch* scratch,
                  LookupPlan* plan);
// Delivers the rows in the plan. A null row gives the initial values of its key.
void DeliverBuckets(const SortedKeys& sorted, int64_t first, int64_t last,
                    const RowTargets& targets, LookupPlan* plan);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_RESOLVE_H_
