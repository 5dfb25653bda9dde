#include "cc_ops/core/table/update_state.h"

#include <algorithm>
#include <cmath>

#include "cc_ops/core/update/rules/row_math.h"

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

double UpdateState::DeferredBound(double gradient) const {
  if (policy_.mode != UpdatePolicy::Mode::kDefer) return 0.;
  return gradient + (num_deferred() == 0 ? 0. : deferred_bound_);
}

void UpdateState::TightenDeferredBound() {
  // So large that the gradients of many updates are read at most once.
  constexpr double kLarge = 0x1p30;
  if (deferred_bound_ <= kLarge) return;
  float largest = 0.f;
  for (ShardUpdates& shard : shards_) {
    for (DeferredGradients& sums : shard.deferred) {
      for (uint32_t at = sums.oldest(); at != DeferredGradients::kNone; at = sums.next(at)) {
        const float* const sum = sums.Sum(at);
        largest = std::max(largest, Largest(dim_, [sum](int64_t j) { return std::fabs(sum[j]); }));
      }
    }
  }
  deferred_bound_ = largest;
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
