#include "cc_ops/core/table/table_room.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "cc_ops/core/base/hash.h"

namespace slipstream {

void EmbeddingTable::MakeRoom(int64_t incoming, const std::vector<int64_t>& pinned) {
  const int64_t needed = size() + incoming - options_.capacity;
  if (options_.capacity == 0 || needed <= 0) return;
  // Value first, then the hash of the key: ties fall the same way everywhere.
  struct Candidate {
    double value;
    float count;
    uint64_t hash;
    int64_t key;
    bool operator<(const Candidate& other) const {
      return std::tie(value, count, hash) < std::tie(other.value, other.count, other.hash);
    }
  };
  // Keeps at most twice the rows to leave. When full, only the best of them stay, and from then on
  // most rows cost one comparison: neither a hash nor a search among the pinned ones.
  const auto leaving = static_cast<size_t>(std::max(needed, options_.capacity / 64));
  std::vector<Candidate> candidates;
  candidates.reserve(std::min(2 * leaving, static_cast<size_t>(size())));
  double most_value = std::numeric_limits<double>::infinity();
  const auto keep_the_best = [&] {
    if (candidates.size() <= leaving) return;
    const auto last = candidates.begin() + static_cast<int64_t>(leaving) - 1;
    std::nth_element(candidates.begin(), last, candidates.end());
    most_value = last->value;
    candidates.resize(leaving);
  };
  for (const TableShard& shard : shards_) {
    for (const HashIndex::Entry& entry : shard.index.entries()) {
      if (entry.slot == HashIndex::kEmpty) continue;
      const double value =
          tracks_use() ? static_cast<double>(shard.last_used[entry.slot]) : entry.count;
      if (value > most_value || std::binary_search(pinned.begin(), pinned.end(), entry.key)) {
        continue;
      }
      candidates.push_back({value, entry.count, HashKey(entry.key), entry.key});
      if (candidates.size() == 2 * leaving) keep_the_best();
    }
  }
  keep_the_best();
  if (candidates.empty()) return;
  for (const Candidate& candidate : candidates) {
    ForgetRow(&shards_[ShardOf(candidate.hash)], candidate.key, candidate.hash);
  }
  num_evicted_ += static_cast<int64_t>(candidates.size());
  ++generation_;
}

Status MakeRoomFor(std::vector<WantedKeys> wanted, const std::string& who) {
  for (WantedKeys& of_table : wanted) {
    std::vector<int64_t>& keys = of_table.keys;
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    const TableOptions& options = of_table.table->options();
    if (static_cast<int64_t>(keys.size()) > options.capacity) {
      return ResourceExhausted(who + " " + std::to_string(keys.size()) + " rows of table '" +
                               options.name + "' at once; its capacity is " +
                               std::to_string(options.capacity) +
                               ": raise the capacity or make the batches smaller");
    }
  }
  for (WantedKeys& of_table : wanted) {
    std::vector<int64_t>& keys = of_table.keys;
    const size_t rows = keys.size();
    const auto is_absent = [&](int64_t key) {
      return of_table.table->Find(key, HashKey(key)) == nullptr;
    };
    keys.erase(std::remove_if(keys.begin(), keys.end(), is_absent), keys.end());
    of_table.table->MakeRoom(static_cast<int64_t>(rows - keys.size()), keys);
  }
  return OkStatus();
}

}  // namespace slipstream
