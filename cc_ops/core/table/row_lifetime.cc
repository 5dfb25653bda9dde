// Admission of keys and expiry of rows.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cc_ops/core/table/row_store.h"

namespace slipstream {
namespace {

// Number of full scans for expired rows per `expire_after`.
constexpr int64_t kRoundsOfLife = 4;

}  // namespace

int64_t SystemSeconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::seconds>(now).count();
}

StoredRow* RowStore::FindOrAdmit(int64_t key, float accesses, uint32_t* index) {
  if (admits() && !Has(key)) {
    const auto shard = static_cast<size_t>(ShardOf(key));
    const uint32_t count = filters_[shard].Add(key, static_cast<uint32_t>(accesses));
    if (count < options_.admit_after) {
      ++not_admitted_[shard];
      *index = HashIndex::kEmpty;
      return nullptr;
    }
  }
  return FindOrInsert(key, accesses, index);
}

int64_t RowStore::num_not_admitted() const {
  return std::accumulate(not_admitted_.begin(), not_admitted_.end(), int64_t{0});
}

std::vector<int64_t> RowStore::NextLookupStep() {
  if (spilled_ != nullptr) spilled_->BeginUse();
  const int64_t before = options_.expires_by_seconds ? now_ : lookup_step_;
  ++lookup_step_;
  now_ = Now(lookup_step_);
  std::vector<int64_t> expired;
  if (options_.expire_after == 0) return expired;
  // Scan one shard at a time. The choice depends only on the clock, so that a restarted process
  // continues with the same shard.
  const int64_t round = std::max<int64_t>(1, options_.expire_after / kRoundsOfLife);
  const auto turns = [&](int64_t time) {
    return time / round * kNumShards + time % round * kNumShards / round;
  };
  const int64_t last = turns(now_), first = std::max(turns(before), last - kNumShards);
  for (int64_t turn = first; turn < last; ++turn) {
    const auto s = static_cast<int>(turn % kNumShards);
    for (const HashIndex::Entry& entry : shards_[s].index.entries()) {
      if (entry.index == HashIndex::kEmpty) continue;
      if (now_ - LastUsed(s, entry.index) > options_.expire_after) expired.push_back(entry.key);
    }
  }
  return expired;
}

int64_t RowStore::LastUsedOf(const TableContents& contents, size_t i, int64_t now) const {
  if (options_.expire_after == 0) {
    return contents.last_used.empty() ? 0 : contents.last_used[i];
  }
  // Ignore times of a table that counted in the other unit.
  constexpr int64_t kMinSeconds = 1000000000;
  if (contents.last_used.empty()) return now;
  const int64_t time = contents.last_used[i];
  const bool is_time = options_.expires_by_seconds ? time >= kMinSeconds : time <= now;
  return is_time ? time : now;
}

}  // namespace slipstream
