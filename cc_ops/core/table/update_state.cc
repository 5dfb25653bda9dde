#include "cc_ops/core/table/update_state.h"

namespace slipstream {

void UpdateState::SetPolicy(const UpdatePolicy& policy) {
  const bool defers = policy.mode == UpdatePolicy::Mode::kDefer;
  const size_t ranks = defers ? static_cast<size_t>(policy.ranks) : 0;
  std::vector<std::vector<DeferredGradients>> empty(kNumShards);
  for (int s = 0; s < kNumShards; ++s) {
    if (shards_[s].deferred.size() != ranks) empty[s].assign(ranks, DeferredGradients(dim_));
  }
  earlier_counts_ = counts();
  for (int s = 0; s < kNumShards; ++s) {
    shards_[s].counts = UpdateCounts();
    if (shards_[s].deferred.size() != ranks) shards_[s].deferred.swap(empty[s]);
  }
  policy_ = policy;
}

UpdateCounts UpdateState::counts() const {
  UpdateCounts sum = earlier_counts_;
  const int step = policy_.is_shadow ? UpdatePolicy::kShadowSampling : 1;
  for (int s = 0; s < kNumShards; s += step) sum.Add(shards_[s].counts, step);
  return sum;
}

int64_t UpdateState::num_deferred() const {
  int64_t n = 0;
  for (const ShardUpdates& shard : shards_) {
    for (const DeferredGradients& sums : shard.deferred) n += sums.size();
  }
  return n;
}

int64_t UpdateState::deferred_bytes() const {
  int64_t bytes = 0;
  for (const ShardUpdates& shard : shards_) {
    for (const DeferredGradients& sums : shard.deferred) bytes += sums.bytes();
  }
  return bytes;
}

void UpdateState::DropDeferred(int64_t key) {
  ShardUpdates& shard = shards_[ShardOf(key)];
  for (DeferredGradients& sums : shard.deferred) {
    const uint32_t index = sums.Find(key);
    if (index == DeferredGradients::kNone) continue;
    sums.Remove(index);
    ++shard.counts.evicted;
  }
}

void UpdateState::DropAllDeferred() {
  for (ShardUpdates& shard : shards_) {
    for (DeferredGradients& sums : shard.deferred) sums.Clear();
  }
}

}  // namespace slipstream
