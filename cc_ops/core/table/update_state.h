// What a table knows of its updates: their policy, the gradients that it defers, and counts.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_UPDATE_STATE_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_UPDATE_STATE_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/deferral/deferred_gradients.h"
#include "cc_ops/core/deferral/update_policy.h"

namespace slipstream {

// What the updates of one shard leave: deferred gradients, and counts.
struct ShardUpdates {
  std::vector<DeferredGradients>
      deferred;  // by simulated rank; empty unless gradients are deferred
  UpdateCounts counts;
};

// Callers hold the table's mutex, as for RowStore.
class UpdateState {
 public:
  explicit UpdateState(int64_t dim) : dim_(dim), shards_(kNumShards) {}

  ShardUpdates* shard(int64_t s) { return &shards_[s]; }
  const UpdatePolicy& policy() const { return policy_; }
  // `policy` must be valid. Deferred gradients must have been flushed, unless only
  // numbers of the policy change. Throws std::bad_alloc, changing nothing.
  void SetPolicy(const UpdatePolicy& policy);

  UpdateCounts counts() const;
  int64_t num_deferred() const;
  int64_t deferred_bytes() const;
  // A row leaves, and with it its deferred gradients; `EvictDeferred` keeps those that are to be
  // exchanged.
  void DropDeferred(int64_t key);
  void EvictDeferred(int64_t key) {
    if (!policy_.is_exchanged) DropDeferred(key);
  }
  // All rows are replaced.
  void DropAllDeferred();

  int64_t step() const { return step_; }
  int64_t NextStep() { return ++step_; }
  void set_step(int64_t step) { step_ = step; }
  // That of the last update, and of a flush after it.
  float last_learning_rate() const { return last_learning_rate_; }
  void set_last_learning_rate(float rate) { last_learning_rate_ = rate; }
  // Updates whose key was evicted since the lookup.
  int64_t num_dropped() const { return num_dropped_; }
  void AddDropped(int64_t n) { num_dropped_ += n; }

 private:
  const int64_t dim_;
  UpdatePolicy policy_;
  std::vector<ShardUpdates> shards_;
  UpdateCounts earlier_counts_;  // under former policies
  float last_learning_rate_ = 0.f;
  int64_t step_ = 0;
  int64_t num_dropped_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_UPDATE_STATE_H_
