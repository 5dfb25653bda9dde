#include "cc_ops/core/lookup/access_count.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/containers/hash_index.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/lookup/key_resolve.h"
#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"

namespace slipstream {
namespace {

// Number of keys that are processed together. Memory prefetched for a wave arrives while the
// previous wave is processed.
constexpr int64_t kWave = 64;

// Reads the keys of features with one key per example, without padding.
class KeyReader {
 public:
  explicit KeyReader(std::vector<FeatureView> features) : features_(std::move(features)) {}

  // Writes the next keys, at most kWave, and returns their number. 0 is the end.
  SLIPSTREAM_ALWAYS_INLINE int64_t Read(int64_t* __restrict__ keys) {
    int64_t n = 0;
    for (; feature_ < features_.size(); ++feature_, example_ = 0) {
      const FeatureView view = features_[feature_];
      const int64_t last = view.batch - 1;
      int64_t i = example_;
      for (; i <= last && n < kWave; ++i) {
        // The columns of a matrix are too far apart for the processor to load them ahead.
        __builtin_prefetch(view.keys + std::min(i + kWave, last) * view.stride);
        const int64_t key = view.keys[i * view.stride];
        keys[n] = key;
        n += view.has_padding && key == view.padding_key ? 0 : 1;
      }
      example_ = i;
      if (n == kWave) break;
    }
    return n;
  }

 private:
  std::vector<FeatureView> features_;
  size_t feature_ = 0;
  int64_t example_ = 0;
};

struct Wave {
  int64_t size = 0;
  int64_t keys[kWave] = {};
  uint64_t hashes[kWave];
  uint8_t shards[kWave];
  HashIndex::Entry* lines[kWave];

  // Reads and hashes the next keys.
  SLIPSTREAM_ALWAYS_INLINE void Read(KeyReader* reader) {
    size = reader->Read(keys);
    for (int64_t i = 0; i < kWave; ++i) hashes[i] = KeyedHash(keys[i]);
    for (int64_t i = 0; i < kWave; ++i) shards[i] = static_cast<uint8_t>(ShardOf(keys[i]));
  }
};

// A float represents larger counts, but not their increments by 1. Lookups add up the accesses of a
// batch first.
constexpr float kMaxCount = 1 << 24;

// Adds an access to the count of each key that is in the first line of its index, and appends the
// other keys to `missed`.
SLIPSTREAM_AVX2_CLONES
void CountInIndex(RowStore* rows, KeyReader* reader, std::vector<int64_t>* missed) {
  struct Lines {
    HashIndex::Entry* entries;
    uint64_t capacity;
  } lines_of[kNumShards];
  for (int s = 0; s < kNumShards; ++s) {
    HashIndex::Entries& entries = rows->shard(s)->index.entries();
    lines_of[s] = {entries.data(), entries.size()};
  }
  const auto prefetch = [&](Wave* wave, int64_t i) SLIPSTREAM_LAMBDA_INLINE {
    const Lines& shard = lines_of[wave->shards[i]];
    wave->lines[i] = shard.entries + HashIndex::HomeIn(wave->hashes[i], shard.capacity);
    __builtin_prefetch(wave->lines[i], 1);
  };
  Wave waves[2];
  Wave *wave = &waves[0], *next = &waves[1];
  wave->Read(reader);
  for (int64_t i = 0; i < wave->size; ++i) prefetch(wave, i);
  for (; wave->size > 0; std::swap(wave, next)) {
    next->Read(reader);
    for (int64_t i = 0; i < wave->size; ++i) {
      // In the same loop, so that the processor loads lines while it compares keys. The last wave
      // prefetches some lines that are not needed.
      prefetch(next, i);
      HashIndex::Entry* const entry = HashIndex::FindInLine(wave->lines[i], wave->keys[i]);
      if (entry != nullptr && entry->count < kMaxCount) {
        entry->count += 1.f;
      } else {
        missed->push_back(wave->keys[i]);
      }
    }
  }
}

// Counts keys of a table, and returns the keys that a lookup must count.
std::vector<int64_t> CountOwnKeys(EmbeddingTable* table, std::vector<FeatureView> features) {
  RowStore& rows = table->rows();
  const bool only_counts = !rows.tracks_use() && !rows.tracks_changes() && !rows.admits();
  bool has_lines = only_counts;
  for (int s = 0; s < kNumShards; ++s) has_lines &= !rows.shard(s)->index.entries().empty();
  std::vector<int64_t> missed;
  KeyReader reader(std::move(features));
  if (has_lines) {
    CountInIndex(&rows, &reader, &missed);
  } else {
    int64_t keys[kWave];
    while (const int64_t n = reader.Read(keys)) missed.insert(missed.end(), keys, keys + n);
  }
  if (!only_counts) return missed;
  const int64_t capacity = table->options().capacity;
  const bool has_room =
      capacity == 0 || rows.size() + static_cast<int64_t>(missed.size()) <= capacity;
  const auto count = [&](int64_t key) {
    HashIndex::Entry* const entry = rows.shard(ShardOf(key))->index.Find(key);
    if (entry == nullptr ? !has_room : entry->count >= kMaxCount) return false;
    uint32_t index = 0;
    rows.FindOrInsert(key, 1.f, &index);
    return true;
  };
  missed.erase(std::remove_if(missed.begin(), missed.end(), count), missed.end());
  return missed;
}

}  // namespace

Status CountAccesses(const std::vector<EmbeddingTable*>& tables,
                     const std::vector<FeatureView>& features, const Parallel& parallel,
                     LookupWorkspace* workspace) {
  std::vector<std::vector<FeatureView>> of_table(tables.size());
  for (const FeatureView& feature : features) {
    of_table[feature.table].push_back(feature);
    of_table[feature.table].back().SplitPositions();
  }
  const ExclusiveTableLocks locks(tables);
  try {
    std::vector<std::vector<int64_t>> missed(tables.size());
    parallel.run(static_cast<int>(tables.size()),
                 [&](int t) { missed[t] = CountOwnKeys(tables[t], std::move(of_table[t])); });
    std::vector<FeatureView> rest;
    for (size_t t = 0; t < tables.size(); ++t) {
      FeatureView view;
      view.table = static_cast<int>(t);
      view.batch = view.num_keys = static_cast<int64_t>(missed[t].size());
      view.keys = missed[t].data();
      if (view.batch > 0) rest.push_back(view);
    }
    if (rest.empty()) return OkStatus();
    const std::vector<Combiner> combiners(rest.size(), Combiner::kSum);
    Status status = SortKeys(tables, rest, combiners, parallel, workspace);
    if (!status.ok()) return status;
    status = BeginLookup(workspace, /*joins_step=*/false);
    if (!status.ok()) return status;
    const SortedKeys& sorted = workspace->sorted;
    const std::vector<int64_t> bounds = BalancedBuckets(sorted.begin, parallel.threads);
    parallel.run(parallel.threads, [&](int task) {
      FindBuckets(sorted, bounds[task], bounds[task + 1], &workspace->scratches[task],
                  &workspace->plan);
    });
  } catch (const std::bad_alloc&) {
    return OutOfMemory("counting the accesses of a batch", tables);
  }
  return OkStatus();
}

}  // namespace slipstream
