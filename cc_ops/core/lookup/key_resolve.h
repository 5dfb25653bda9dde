// Finds or makes the rows of a batch's keys, bucket by bucket, each distinct key once.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_RESOLVE_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_RESOLVE_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/lookup/lookup_plan.h"

namespace slipstream {

// Where a feature's pooled vectors lie: example i's begins at data + i * stride and
// has the dim of the feature's table.
struct PooledOutput {
  float* data = nullptr;
  int64_t stride = 0;
};

// What becomes of the rows that are found.
struct RowTargets {
  // Of features whose row is their pooled vector: where it goes. data is null for the others.
  std::vector<PooledOutput> copied;  // [features]
  // By position, for the other features; null if there are none.
  std::vector<const float*>* row_of_position = nullptr;
  // Room for copies of the rows that row_of_position points to where they do not lie in memory as
  // floats, or may be of keys without a row: [keys of the plan, copy_dim].
  float* copies = nullptr;
  int64_t copy_dim = 0;
};

// Resolves the buckets [first, last) of the sorted keys, whose shards no other thread touches:
// counts accesses, makes missing rows, fills the plan's entries of these buckets and delivers the
// rows. Rows are made in the order in which their keys appear. Throws std::bad_alloc, leaving the
// tables intact.
void ResolveBuckets(const SortedKeys& sorted, int64_t first, int64_t last,
                    const RowTargets& targets, ResolveScratch* scratch, LookupPlan* plan);

// The same in two steps: this one delivers no rows. Of rows on the disk, accesses are counted, and
// the plan's row is null: somebody brings them in and sets it. So is the row of keys that have
// none, whose index is HashIndex::kEmpty.
void FindBuckets(const SortedKeys& sorted, int64_t first, int64_t last, ResolveScratch* scratch,
                 LookupPlan* plan);
// Or this one, between which somebody else sets the plan's rows: it fills the plan's entries but
// for the rows, and looks for none.
void GroupBuckets(const SortedKeys& sorted, int64_t first, int64_t last, ResolveScratch* scratch,
                  LookupPlan* plan);
// Delivers the rows of the plan.
void DeliverBuckets(const SortedKeys& sorted, int64_t first, int64_t last,
                    const RowTargets& targets, LookupPlan* plan);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_RESOLVE_H_
