// State of a table's updates: update policy, deferred gradients and counters.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_UPDATE_STATE_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_UPDATE_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/deferral/deferred_gradients.h"
#include "cc_ops/core/deferral/update_policy.h"

namespace slipstream {

// Deferred gradients and counters of one shard.
struct ShardUpdates {
  std::vector<DeferredGradients>
      deferred;  // One per simulated rank; empty unless gradients are deferred.
  UpdateCounts counts;
};

// Callers hold the mutex of the table as for RowStore.
class UpdateState {
 public:
  explicit UpdateState(int64_t dim) : dim_(dim), shards_(kNumShards) {}

  ShardUpdates* shard(int64_t s) { return &shards_[s]; }
  const UpdatePolicy& policy() const { return policy_; }
  // Replaces the policy, which must be valid. Flush deferred gradients first, unless only
  // `movement`, `max_age`, `max_rows` or `decay_skipped` change. Throws std::bad_alloc (strong
  // exception guarantee).
  void SetPolicy(const UpdatePolicy& policy);

  // Counts of all policies since the creation of the table. In shadow mode, the counts of the
  // sampled shards are multiplied to estimate the counts of all shards.
  UpdateCounts counts() const;
  int64_t num_deferred() const;    // Number of deferred gradients.
  int64_t deferred_bytes() const;  // Bytes of memory for deferred gradients.
  // Drops the deferred gradients of a key and counts them as UpdateCounts::evicted. Call it when
  // the user removes or overwrites its row.
  void DropDeferred(int64_t key);
  // Same, for a row that is evicted or expires. Keeps gradients that still have to be exchanged.
  void EvictDeferred(int64_t key) {
    if (!policy_.is_exchanged) DropDeferred(key);
  }
  // Drops all deferred gradients because all rows are replaced.
  void DropAllDeferred();

  // Returns an upper bound of the magnitudes of deferred gradients after an update with gradients
  // of at most `gradient`.
  double DeferredBound(double gradient) const;
  // Same, of the gradients that this update applies, including deferred gradients of all ranks.
  double AppliedBound(double gradient) const {
    return gradient + policy_.ranks * DeferredBound(gradient);
  }
  // Sets DeferredBound(0). Call it after each update.
  void set_deferred_bound(double bound) { deferred_bound_ = bound; }
  // Replaces a large bound by the largest magnitude of all deferred gradients. The bound grows in
  // each update, but gradients do not stay deferred forever.
  void TightenDeferredBound();

  // Error of the last collection of gradients if it passed on values that are not finite, else
  // empty. The error of their update repeats it.
  const std::string& lost_cause() const { return lost_cause_; }
  void set_lost_cause(const std::string& cause) { lost_cause_ = cause; }

  // Number of updates of the table.
  int64_t step() const { return step_; }
  int64_t NextStep() { return ++step_; }
  void set_step(int64_t step) { step_ = step; }
  // Learning rate of the last update; a later flush uses it.
  float last_learning_rate() const { return last_learning_rate_; }
  void set_last_learning_rate(float rate) { last_learning_rate_ = rate; }
  // Number of gradients that were dropped because their key had no row, for example because the row
  // was evicted after the lookup. Keys that are too rare for a row do not always count.
  int64_t num_dropped() const { return num_dropped_; }
  void AddDropped(int64_t n) { num_dropped_ += n; }

 private:
  const int64_t dim_;
  UpdatePolicy policy_;
  std::vector<ShardUpdates> shards_;
  UpdateCounts earlier_counts_;  // Counts under earlier policies.
  float last_learning_rate_ = 0.f;
  int64_t step_ = 0;
  int64_t num_dropped_ = 0;
  double deferred_bound_ = 0.;
  std::string lost_cause_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_UPDATE_STATE_H_
