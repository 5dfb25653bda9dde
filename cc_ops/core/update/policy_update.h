// Updates under a policy that masks or defers gradients.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_POLICY_UPDATE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_POLICY_UPDATE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/update/update_loop.h"

namespace slipstream {

// Memory of a thread that updates rows of these tables.
struct PolicyScratch {
  explicit PolicyScratch(const std::vector<EmbeddingTable*>& tables);
  RowScratch row;          // its sum: of one rank's gradients
  std::vector<float> due;  // of all ranks' sums that are applied
};

// Gradient sums of one table that are to be exchanged instead of applied.
struct CollectedRows {
  std::vector<int64_t> keys;  // [n]
  std::vector<float> rows;    // [n, dim]
};

// Which deferred gradients a batch's keys have, found before the first of them is used: while one
// key is at work, those of the next come from memory. With simulated ranks they are not.
class DeferredOfKeys {
 public:
  // Throws std::bad_alloc.
  explicit DeferredOfKeys(const LookupPlan& plan);
  // Of the keys of buckets that a thread is about to update.
  void Find(CellRange buckets);
  // Where those of a bucket's keys are, or null where Find does not look for them.
  const DeferredGradients* In(int64_t bucket) const;
  // That of key u of the plan, or DeferredGradients::kNone.
  uint32_t Of(int64_t u) const { return indices_[u]; }

 private:
  const LookupPlan& plan_;
  std::unique_ptr<uint32_t[]> indices_;  // by key of the plan
};

// Updates the bucket's rows as the table's policy says. What is due of a key on several simulated
// ranks is added and applied as one gradient. Touches nothing but the bucket's shard. next: the
// bucket that this thread comes to after it. With `collected`, what would be applied is added to
// that, which must have room for it, and no row is touched; a key that was evicted since the lookup
// keeps its gradients then.
void UpdateBucketByPolicy(const BucketUpdate& update, int64_t next, const DeferredOfKeys& deferred,
                          PolicyScratch* scratch, CollectedRows* collected = nullptr);

// Brings in the rows of tables that spill which an update of the plan's keys needs: those that have
// left memory since the lookup and, with_due, those whose deferred gradients will be due. The
// caller holds the mutexes.
Status BringInForUpdate(const LookupPlan& plan, bool with_due, const Parallel& parallel);

// Most rows that are collected of a bucket.
int64_t MostCollected(const LookupPlan& plan, int64_t bucket);

// Moves all deferred gradients to `collected`, which must have room for them; in shadow mode
// forgets them. The caller holds the table's mutex exclusively.
void CollectDeferred(EmbeddingTable* table, PolicyScratch* scratch, CollectedRows* collected);

// Applies all deferred gradients, each as one; in shadow mode, where they were applied when they
// came, forgets them. Those that are to be exchanged stay, and so do imported
// ones of a table that has had neither an update nor a learning rate. The caller holds the table's
// mutex exclusively. Throws std::bad_alloc, changing nothing. Errors as RowStore::BringIn: some are
// applied, the others stay.
Status FlushDeferred(EmbeddingTable* table, const Parallel& parallel);

// The same of several tables, whose mutexes it takes: an evaluation sees every gradient.
// ResourceExhausted without memory; tables are flushed one after the other.
Status FlushBeforeReading(const std::vector<EmbeddingTable*>& tables, const Parallel& parallel);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_POLICY_UPDATE_H_
