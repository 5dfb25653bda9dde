// Updates under a policy that masks or defers gradients.
//
// A masked gradient is dropped. A deferred gradient is added to the sum of its key in the shard.
// The sum is applied when the policy decides that it is due: because of the distance that it would
// move the row, because the row is not saturated, because of the sum's age, or in a flush.
// UpdatePolicy describes the settings, deferral.h the decision. A policy can simulate multiple
// ranks in one process (UpdatePolicy::ranks): each has its own part of the batch and its own
// deferred gradients. With a shadow policy (is_shadow), every gradient is applied at once, and the
// decisions are only counted.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_POLICY_UPDATE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_POLICY_UPDATE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/update/update_loop.h"

namespace slipstream {

// Scratch memory of a thread that updates rows of these tables.
struct PolicyScratch {
  explicit PolicyScratch(const std::vector<EmbeddingTable*>& tables);
  RowScratch row;          // `row.sum` contains the sum of a key's gradients on one simulated rank.
  std::vector<float> due;  // Sum of the due gradients of all simulated ranks, which is applied.
};

// Gradient sums of one table that are exchanged instead of applied.
struct CollectedRows {
  std::vector<int64_t> keys;  // [n]
  std::vector<float> rows;    // [n, dim]
};

// Deferred gradients of the keys in a batch. They are found before the first one is used, so that
// the update can prefetch the deferred gradients of the following keys. Used only without simulated
// ranks.
class DeferredOfKeys {
 public:
  // Throws std::bad_alloc.
  explicit DeferredOfKeys(const LookupPlan& plan);
  // Finds the deferred gradients for the buckets that a thread is about to update.
  void Find(CellRange buckets);
  // Returns the deferred gradients of a bucket, or null if its policy defers none, simulates ranks
  // or does not sample the shard.
  const DeferredGradients* In(int64_t bucket) const;
  // Returns the index of the deferred gradient of key u of the plan in In(bucket), or
  // DeferredGradients::kNone. Call Find first.
  uint32_t Of(int64_t u) const { return indices_[u]; }

 private:
  const LookupPlan& plan_;
  std::unique_ptr<uint32_t[]> indices_;  // By key of the plan.
};

// Updates the rows of a bucket under the table's policy. Gradients of a key that are due on
// multiple simulated ranks are added and applied as one gradient. Touches only the shard of the
// bucket. next: the thread's following bucket.
//
// With `collected`, appends the gradients to it instead of applying them. The only change of rows
// is then the decay of the slots of masked rows (UpdatePolicy::decay_skipped). `collected` must
// have room for MaxCollected rows. Gradients of a key that was evicted after the lookup are also
// collected; without `collected` they are dropped and counted.
void UpdateBucketByPolicy(const BucketUpdate& update, int64_t next, const DeferredOfKeys& deferred,
                          PolicyScratch* scratch, CollectedRows* collected = nullptr);

// Loads rows of tables that spill which the update of the plan needs: rows that left memory after
// the lookup and, if `with_due`, rows whose deferred gradients are due. The caller holds the
// mutexes.
Status LoadForUpdate(const LookupPlan& plan, bool with_due, const Parallel& parallel);

// Returns the maximum number of rows that UpdateBucketByPolicy collects for a bucket.
int64_t MaxCollected(const LookupPlan& plan, int64_t bucket);

// Moves all deferred gradients to `collected`, which must have room for them. With a shadow policy
// it drops them, because they were applied already. The caller holds the table's mutex exclusively.
void CollectDeferred(EmbeddingTable* table, PolicyScratch* scratch, CollectedRows* collected);

// Applies all deferred gradients, one per key, with the learning rate of the last update. With a
// shadow policy it drops them, because they were applied already. It has no effect if the policy
// sets `is_exchanged`. Without a shadow policy, it also has no effect if the number of updates and
// the last learning rate are both 0, because the rate of imported gradients is then unknown.
//
// The caller holds the mutex of the table exclusively. Throws std::bad_alloc (strong exception
// guarantee unless the table spills). Returns the errors of RowStore::LoadRow, and
// InvalidArgument if an updated row would not be finite. If a table that spills fails, a part of
// its gradients may have been applied.
Status FlushDeferred(EmbeddingTable* table, const Parallel& parallel);

// Flushes multiple tables, so that an evaluation includes every gradient. Takes their mutexes.
// Returns the errors of FlushDeferred, and ResourceExhausted if memory runs out. The tables are
// flushed one after the other.
Status FlushBeforeReading(const std::vector<EmbeddingTable*>& tables, const Parallel& parallel);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_POLICY_UPDATE_H_
