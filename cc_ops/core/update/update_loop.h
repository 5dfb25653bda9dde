// The shared parts of all row updates: the loop over keys, the sum of the gradients of a key, and
// the update of its row.
//
// An update runs over the buckets of a LookupPlan. Each bucket belongs to one thread. For each
// distinct key of a bucket, the thread sums the gradients of the key's uses in batch order and
// applies the update rule of the table once. Because the order is fixed, the result does not depend
// on the number of threads.
//
// The loop is bound by memory latency. It therefore prefetches the rows of the following keys,
// across the boundary to the thread's next bucket (`next`).
//
// Every function here may run only while the caller holds the mutexes of the tables exclusively.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_UPDATE_LOOP_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_UPDATE_LOOP_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/update/gradient_update.h"
#include "cc_ops/core/update/rules/row_math.h"

namespace slipstream {

// Number of rows, and of uses (Occurrence), by which prefetches are ahead.
constexpr int64_t kUpdatePrefetch = 8;
constexpr int64_t kFloatBytes = sizeof(float);

SLIPSTREAM_ALWAYS_INLINE void PrefetchBytes(const void* begin, int64_t bytes) {
  const auto* const first = static_cast<const char*>(begin);
  for (int64_t j = 0; j < bytes; j += kLineBytes) __builtin_prefetch(first + j, 1);
}

// Calls update(i) for each i in `range`. Before each call it calls prefetch(i + kAhead, false) or,
// where `range` ends before i + kAhead, prefetch(j, true) for an item j of `next`, the range that
// the thread processes afterwards. Both callables must be inlined (SLIPSTREAM_LAMBDA_INLINE).
template <int64_t kAhead = kUpdatePrefetch, class Prefetch, class Update>
SLIPSTREAM_ALWAYS_INLINE void UpdateEach(CellRange range, CellRange next, const Prefetch& prefetch,
                                         const Update& update) {
  // Distance from the end of the range to the next range.
  const int64_t jump = next.begin - range.end;
  for (int64_t i = range.begin; i < range.end; ++i) {
    int64_t ahead = i + kAhead;
    const bool is_next = ahead >= range.end;
    if (is_next) ahead += jump;
    if (!is_next || (ahead >= next.begin && ahead < next.end)) prefetch(ahead, is_next);
    update(i);
  }
}

// The keys of one table and shard in a batch, with the data for their update.
struct BucketUpdate {
  RowShard* shard() const { return table->rows().shard(bucket % kNumShards); }

  const LookupPlan* plan;
  const std::vector<PooledGradient>* gradients;
  EmbeddingTable* table;
  int64_t bucket;  // Number of the bucket in the plan.
  StepRates rates;
  bool is_stale;     // Whether rows may have been removed since the lookup.
  int64_t* dropped;  // Counts updates whose key was evicted after the lookup.
};

// State of one table in the update of all tables of a plan.
struct TableUpdate {
  void Begin(const LookupPlan& plan, size_t t, StepRates of_table) {
    rates = of_table;
    is_stale = plan.tables[t]->rows().addresses() != plan.generations[t];
  }

  StepRates rates;
  bool is_checked = false;  // Whether a TableBackup checks the result.
  bool is_stale = false;
  std::atomic<int64_t> dropped{0};
};

// Calls update(bucket, next) for the buckets of a thread, where `bucket` is a BucketUpdate and
// `next` the number of the following bucket, or of the same bucket at the end. Adds the dropped
// updates to `tables` ([tables]).
template <class Update>
void UpdateBuckets(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                   CellRange buckets, std::vector<TableUpdate>* tables, const Update& update) {
  for (int64_t b = buckets.begin; b < buckets.end; ++b) {
    const size_t t = static_cast<size_t>(b / kNumShards);
    TableUpdate& table = (*tables)[t];
    int64_t dropped = 0;
    update(
        BucketUpdate{&plan, &gradients, plan.tables[t], b, table.rates, table.is_stale, &dropped},
        std::min(b + 1, buckets.end - 1));
    if (dropped > 0) table.dropped += dropped;
  }
}

// Returns the range of the distinct keys of a bucket in the plan.
inline CellRange KeysOf(const LookupPlan& plan, int64_t bucket) {
  const int64_t begin = plan.unique_begin[bucket];
  return {begin, begin + plan.unique_count[bucket]};
}

// The row of a key.
struct FoundRow {
  StoredRow* row;  // Null if the key has no row.
  uint32_t index;  // Index within the shard.
};

// Calls update(u, first_use, found) for each distinct key u of the bucket, where `first_use` is the
// position of its first use in plan.uses and `found` is its FoundRow. Prefetches the rows of the
// following keys and calls prefetch(u, is_next) for each; `is_next` is true for keys of the bucket
// `next`. If rows may have been removed since the lookup, it finds them again.
template <class Prefetch, class Update>
SLIPSTREAM_ALWAYS_INLINE void UpdateEachKey(const BucketUpdate& bucket, int64_t next,
                                            const Prefetch& prefetch, const Update& update) {
  const LookupPlan& plan = *bucket.plan;
  const CellRange keys = KeysOf(plan, bucket.bucket);
  const int64_t row_bytes = bucket.table->rows().layout().bytes();
  int64_t use = keys.begin;
  UpdateEach(
      keys, KeysOf(plan, next),
      [&](int64_t u, bool is_next) SLIPSTREAM_LAMBDA_INLINE {
        PrefetchBytes(plan.unique_row[u], row_bytes);
        prefetch(u, is_next);
      },
      [&](int64_t u) SLIPSTREAM_LAMBDA_INLINE {
        FoundRow found = {plan.unique_row[u], plan.unique_index[u]};
        if (bucket.is_stale) {
          const int64_t key = plan.unique_key[u];
          found.index = HashIndex::kEmpty;
          found.row = bucket.table->rows().Find(key, &found.index);
        }
        update(u, use, found);
        use = plan.uses_end[u];
      });
}

// Adds `part` to `total`, both [dim].
inline void AddTo(float* total, const float* part, int64_t dim) {
  for (int64_t j = 0; j < dim; ++j) total[j] += part[j];
}

// Adds `scale` times part[j, dim) in vectors of kWidth. Returns the end of the last vector.
template <int kWidth>
SLIPSTREAM_ALWAYS_INLINE int64_t AddVectors(float* total, const float* part, float scale, int64_t j,
                                            int64_t dim) {
  using Values __attribute__((vector_size(kWidth * sizeof(float)))) = float;
  for (; j + kWidth <= dim; j += kWidth) {
    Values sum, own;
    std::memcpy(&sum, total + j, sizeof(sum));
    std::memcpy(&own, part + j, sizeof(own));
    sum += scale * own;
    std::memcpy(total + j, &sum, sizeof(sum));
  }
  return j;
}

// Adds scale * part to `total`, both [dim]. Uses explicit vectors, because for a known dimension
// compilers would sum each value in a scalar register.
SLIPSTREAM_ALWAYS_INLINE void AddScaledTo(float* total, const float* part, float scale,
                                          int64_t dim) {
  int64_t j = AddVectors<16>(total, part, scale, 0, dim);
  j = AddVectors<4>(total, part, scale, j, dim);
  for (; j < dim; ++j) total[j] += scale * part[j];
}

// Sets `summed` ([dim]) to the sum of the gradients of the plan's uses [begin, end), in order, each
// multiplied by the scale of its position.
SLIPSTREAM_ALWAYS_INLINE void SumUses(const LookupPlan& plan,
                                      const std::vector<PooledGradient>& gradients, int64_t begin,
                                      int64_t end, int64_t dim, float* __restrict__ summed) {
  const int64_t num_uses = static_cast<int64_t>(plan.uses.size());
  for (int64_t j = 0; j < dim; ++j) summed[j] = 0.f;
  for (int64_t use = begin; use < end; ++use) {
    if (use + kUpdatePrefetch < num_uses) {
      const Occurrence& next = plan.uses[use + kUpdatePrefetch];
      const PooledGradient& gradient = gradients[next.feature];
      PrefetchBytes(gradient.data + next.example * gradient.stride, dim * kFloatBytes);
    }
    const Occurrence& o = plan.uses[use];
    const float* __restrict__ g =
        gradients[o.feature].data + o.example * gradients[o.feature].stride;
    // Multiplying by a scale of 1 changes no bit.
    AddScaledTo(summed, g, plan.scale.empty() ? 1.f : plan.scale[plan.use_position[use]], dim);
  }
}

// The examples of a batch that belong to one simulated rank: an even split of each feature's
// examples.
struct RankShare {
  // Returns whether a use is in an example of the rank.
  bool Has(const LookupPlan& plan, const Occurrence& use) const {
    const CellRange own = CellsOf(rank, ranks, plan.examples[use.feature]);
    return use.example >= own.begin && use.example < own.end;
  }
  int rank, ranks;
};

// Same as SumUses, for the uses in the examples of one simulated rank.
inline void SumUsesOf(RankShare share, const LookupPlan& plan,
                      const std::vector<PooledGradient>& gradients, int64_t begin, int64_t end,
                      int64_t dim, float* __restrict__ summed) {
  if (share.ranks == 1) return SumUses(plan, gradients, begin, end, dim, summed);
  std::fill_n(summed, dim, 0.f);
  for (int64_t use = begin; use < end; ++use) {
    const Occurrence& o = plan.uses[use];
    if (!share.Has(plan, o)) continue;
    const float scale = plan.scale.empty() ? 1.f : plan.scale[plan.use_position[use]];
    const float* g = gradients[o.feature].data + o.example * gradients[o.feature].stride;
    for (int64_t j = 0; j < dim; ++j) summed[j] += scale * g[j];
  }
}

// Scratch memory for the update of a row, sized for the widest of multiple tables.
struct RowScratch {
  explicit RowScratch(const std::vector<EmbeddingTable*>& tables) {
    size_t widest = 0, max_floats = 0;
    for (const EmbeddingTable* table : tables) {
      const RowLayout& layout = table->rows().layout();
      widest = std::max(widest, static_cast<size_t>(layout.dim));
      max_floats = std::max(max_floats, static_cast<size_t>(layout.floats()));
    }
    sum.resize(widest);
    copy.resize(max_floats);
  }
  std::vector<float> sum;   // Sum of a key's gradients.
  std::vector<float> copy;  // A row and its slots.
};

// Applies the transforms and the update rule of the table to a row of `shard` that RowLayout::Open
// returned. gradient: [dim], overwritten.
inline void UpdateOpened(const EmbeddingTable* table, const StepRates& rates, float* gradient,
                         float* row, RowShard* shard) {
  const RowLayout& layout = table->rows().layout();
  table->options().rule.Update(rates, layout.dim, gradient, row);
  table->rows().NoteRange(row, shard);
}

// Applies the transforms and the update rule of the table to the row of a key. gradient: [dim], the
// summed gradient, overwritten. found.row: not null.
inline void UpdateRow(EmbeddingTable* table, const StepRates& rates, int64_t key, float* gradient,
                      FoundRow found, RowScratch* scratch) {
  const RowLayout& layout = table->rows().layout();
  table->rows().Change(ShardOf(key), found.index);
  float* const row = layout.Open(found.row, scratch->copy.data());
  UpdateOpened(table, rates, gradient, row, table->rows().shard(ShardOf(key)));
  layout.Close(row, key, rates.rounding, found.row);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_UPDATE_LOOP_H_
