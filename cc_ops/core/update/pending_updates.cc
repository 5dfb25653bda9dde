#include "cc_ops/core/update/pending_updates.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

// In updates: longer than any training.
constexpr int64_t kMostAge = int64_t{1} << 48;

std::string Place(const EmbeddingTable& table, size_t i) {
  return " of pending update " + std::to_string(i) + " of table '" + table.options().name + "'";
}

}  // namespace

PendingUpdates ExportPending(EmbeddingTable* table) {
  PendingUpdates pending;
  const size_t n = static_cast<size_t>(table->updates().num_deferred());
  pending.keys.reserve(n);
  pending.ages.reserve(n);
  pending.ranks.reserve(n);
  pending.sums.reserve(n * static_cast<size_t>(table->dim()));
  for (int64_t s = 0; s < kNumShards; ++s) {
    std::vector<DeferredSums>& ranks = table->updates().shard(s)->deferred;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      DeferredSums& sums = ranks[rank];
      for (uint32_t at = sums.oldest(); at != DeferredSums::kNone; at = sums.next(at)) {
        pending.keys.push_back(sums.key(at));
        pending.ages.push_back(table->updates().step() - sums.since(at));
        pending.ranks.push_back(static_cast<int32_t>(rank));
        pending.sums.insert(pending.sums.end(), sums.Sum(at), sums.Sum(at) + table->dim());
      }
    }
  }
  return pending;
}

Status ImportPending(EmbeddingTable* table, const PendingUpdates& pending) {
  const UpdatePolicy& policy = table->updates().policy();
  const size_t n = pending.keys.size(), dim = static_cast<size_t>(table->dim());
  if (pending.ages.size() != n || pending.ranks.size() != n || pending.sums.size() != n * dim) {
    return InvalidArgument("pending updates of table '" + table->options().name + "' have " +
                           std::to_string(n) + " keys, " + std::to_string(pending.ages.size()) +
                           " ages, " + std::to_string(pending.ranks.size()) + " ranks and " +
                           std::to_string(pending.sums.size()) + " values; allowed: 1, 1 and " +
                           std::to_string(dim) + " per key");
  }
  if (n > 0 && policy.mode != UpdatePolicy::Mode::kDefer) {
    return InvalidArgument("table '" + table->options().name + "' is to take " + std::to_string(n) +
                           " pending updates, but its policy holds none; set a policy that "
                           "defers first");
  }
  std::vector<std::vector<DeferredSums>> held(kNumShards);
  std::vector<std::vector<int64_t>> youngest(kNumShards);
  for (int64_t s = 0; s < kNumShards; ++s) {
    const size_t ranks = table->updates().shard(s)->deferred.size();
    held[s].assign(ranks, DeferredSums(table->dim()));
    youngest[s].assign(ranks, 0);
  }
  for (size_t i = 0; i < n; ++i) {
    const int64_t key = pending.keys[i];
    const uint64_t hash = HashKey(key);
    const int s = ShardOf(hash);
    const int64_t rank = pending.ranks[i];
    if (rank < 0 || rank >= static_cast<int64_t>(held[s].size())) {
      return InvalidArgument("rank" + Place(*table, i) + " is " + std::to_string(rank) +
                             "; allowed: 0 to " + std::to_string(held[s].size() - 1));
    }
    // Shadow mode applies no sums: those of keys that it does not sample are nobody's.
    if (!policy.Samples(s)) continue;
    DeferredSums& sums = held[s][static_cast<size_t>(rank)];
    int64_t& age = youngest[s][static_cast<size_t>(rank)];
    if (pending.ages[i] < 0 || (sums.size() > 0 && pending.ages[i] > age)) {
      return InvalidArgument("age" + Place(*table, i) + " is " + std::to_string(pending.ages[i]) +
                             "; allowed: 0 or more, the oldest first");
    }
    if (pending.ages[i] > kMostAge) {
      return InvalidArgument("age" + Place(*table, i) + ", key " + std::to_string(key) + ", is " +
                             std::to_string(pending.ages[i]) + "; allowed: up to " +
                             std::to_string(kMostAge));
    }
    const float* sum = pending.sums.data() + i * dim;
    const auto bad =
        std::find_if(sum, sum + dim, [](float value) { return !std::isfinite(value); });
    if (bad != sum + dim) {
      return InvalidArgument("sum" + Place(*table, i) + ", key " + std::to_string(key) + ", has " +
                             std::to_string(*bad) + "; allowed: finite values");
    }
    age = pending.ages[i];
    if (sums.Find(key, hash) != DeferredSums::kNone) {
      return InvalidArgument("key" + Place(*table, i) + " is " + std::to_string(key) +
                             ", which has come before; each may come once per rank");
    }
    if (!policy.is_exchanged && table->rows().Find(key, hash) == nullptr) {
      return InvalidArgument("key" + Place(*table, i) + " is " + std::to_string(key) +
                             "; allowed: keys with a row");
    }
    const uint32_t place = sums.Insert(key, hash, table->updates().step() - age);
    std::copy_n(sum, dim, sums.Sum(place));
  }
  for (int64_t s = 0; s < kNumShards; ++s) table->updates().shard(s)->deferred = std::move(held[s]);
  return OkStatus();
}

}  // namespace slipstream
