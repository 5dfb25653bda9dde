#include "cc_ops/core/batch_lookup.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <utility>

#include "cc_ops/core/hash.h"
#include "cc_ops/core/key_sort.h"
#include "cc_ops/core/policy_update.h"
#include "cc_ops/core/table_locks.h"
#include "cc_ops/core/table_room.h"

namespace slipstream {
namespace {

constexpr int64_t kPrefetchDistance = 8;

// Evicts what the batch's new keys need from bounded tables about to overflow.
Status MakeRoomForBatch(const std::vector<EmbeddingTable*>& tables, const SortedKeys& sorted) {
  std::vector<WantedKeys> wanted;
  for (size_t t = 0; t < tables.size(); ++t) {
    const int64_t begin = sorted.begin[t * kNumShards], end = sorted.begin[(t + 1) * kNumShards];
    if (!MayOverflow(*tables[t], end - begin)) continue;
    wanted.push_back({tables[t], {sorted.key.begin() + begin, sorted.key.begin() + end}});
  }
  return MakeRoomFor(std::move(wanted), "a batch needs");
}

// Numbers the distinct slots of one bucket, in order of appearance.
class SlotNumbers {
 public:
  void Reset(int64_t n) {
    size_t wanted = 16;
    while (wanted < static_cast<size_t>(2 * n)) wanted *= 2;
    if (places_.size() < wanted) places_.resize(wanted);
    mask_ = wanted - 1;
    std::fill(places_.begin(), places_.begin() + static_cast<int64_t>(wanted), Place{0, -1});
    count_ = 0;
  }
  int32_t NumberOf(uint32_t slot, bool* is_new) {
    size_t i = (slot * 2654435761u >> 7) & mask_;
    while (places_[i].number >= 0 && places_[i].slot != slot) i = (i + 1) & mask_;
    *is_new = places_[i].number < 0;
    if (*is_new) places_[i] = {slot, count_++};
    return places_[i].number;
  }

 private:
  struct Place {
    uint32_t slot;
    int32_t number;
  };
  std::vector<Place> places_;
  size_t mask_ = 0;
  int32_t count_ = 0;
};

// Finds or makes the rows of one bucket and groups its uses by key. Keys before
// `prefetch_end` are the table's and in shards of this thread.
void ResolveBucket(EmbeddingTable* table, const SortedKeys& sorted, int64_t bucket,
                   int64_t prefetch_end, SlotNumbers* numbers, std::vector<int32_t>* number_of,
                   LookupPlan* plan, std::vector<float*>* row_of_position) {
  const int64_t begin = sorted.begin[bucket], end = sorted.begin[bucket + 1];
  if (begin == end) return;
  numbers->Reset(end - begin);
  number_of->resize(static_cast<size_t>(end - begin));
  int64_t distinct = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kPrefetchDistance < prefetch_end) {
      table->Prefetch(HashKey(sorted.key[i + kPrefetchDistance]));
    }
    uint32_t slot = 0;
    float* row = table->FindOrInsert(sorted.key[i], HashKey(sorted.key[i]), 1.f, &slot);
    __builtin_prefetch(row);
    (*row_of_position)[sorted.use[i].position] = row;
    bool is_new = false;
    const int32_t number = numbers->NumberOf(slot, &is_new);
    (*number_of)[i - begin] = number;
    if (is_new) {
      plan->unique_key[begin + number] = sorted.key[i];
      plan->unique_row[begin + number] = row;
      plan->unique_slot[begin + number] = slot;
      plan->uses_end[begin + number] = 0;
      ++distinct;
    }
    ++plan->uses_end[begin + number];
  }
  plan->unique_count[bucket] = distinct;
  // Counting sort of the uses by key: uses_end first holds counts, then starts,
  // and, once every use is placed, ends.
  int64_t next = begin;
  for (int64_t u = begin; u < begin + distinct; ++u) {
    const int64_t count = plan->uses_end[u];
    plan->uses_end[u] = next;
    next += count;
  }
  for (int64_t i = begin; i < end; ++i) {
    plan->uses[plan->uses_end[begin + (*number_of)[i - begin]]++] = sorted.use[i];
  }
}

// Fills scale[position] for the features that need it; leaves it empty if none does.
void ComputeScales(const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                   const Positions& positions, const Parallel& parallel,
                   std::vector<float>* scale) {
  scale->clear();
  bool is_needed = false;
  for (size_t f = 0; f < features.size(); ++f) {
    is_needed = is_needed || !IsUnscaled(features[f], combiners[f]);
  }
  if (!is_needed) return;
  scale->assign(static_cast<size_t>(positions.total), 1.f);
  const int tasks = parallel.threads;
  for (size_t f = 0; f < features.size(); ++f) {
    const FeatureView& view = features[f];
    if (IsUnscaled(view, combiners[f])) continue;
    parallel.run(tasks, [&](int task) {
      const CellRange range = CellsOf(task, tasks, view.batch);
      for (int64_t i = range.begin; i < range.end; ++i) {
        const float factor = BagFactor(view, combiners[f], i);
        for (int64_t p = view.begin(i); p < view.end(i); ++p) {
          const float weight = view.weights == nullptr ? 1.f : view.weights[p];
          (*scale)[positions.of(static_cast<int>(f), i, p)] = weight * factor;
        }
      }
    });
  }
}

void Pool(const std::vector<EmbeddingTable*>& tables, const std::vector<FeatureView>& features,
          const std::vector<Combiner>& combiners, const Positions& positions,
          const std::vector<float*>& row_of_position, const std::vector<float>& scale,
          const std::vector<PooledOutput>& outputs, const Parallel& parallel) {
  const int tasks = parallel.threads;
  const int64_t batch = features.empty() ? 0 : features[0].batch;
  const int64_t cells = static_cast<int64_t>(features.size()) * batch;
  parallel.run(tasks, [&](int task) {
    const CellRange range = CellsOf(task, tasks, cells);
    for (int64_t cell = range.begin; cell < range.end;) {
      const int f = static_cast<int>(cell / batch);
      const FeatureView& view = features[f];
      const int64_t dim = tables[view.table]->dim();
      const bool is_unscaled = IsUnscaled(view, combiners[f]);
      const int64_t last = std::min(range.end, (f + 1) * batch);
      for (; cell < last; ++cell) {
        const int64_t i = cell - f * batch;
        if (positions.is_column[f] && i + kPrefetchDistance < batch) {
          const float* ahead = row_of_position[positions.base[f] + i + kPrefetchDistance];
          for (int64_t j = 0; j < dim; j += 16) __builtin_prefetch(ahead + j);
        }
        PoolExample(
            view, i, dim, is_unscaled,
            [&](int64_t p) { return row_of_position[positions.of(f, i, p)]; },
            [&](int64_t p) { return scale[positions.of(f, i, p)]; },
            outputs[f].data + i * outputs[f].stride);
      }
    }
  });
}

Status OutOfMemory(const std::string& doing) {
  return ResourceExhausted("out of memory while " + doing +
                           "; the tables are intact: free memory, or bound the tables by capacity");
}

// An evaluation sees every gradient.
void FlushAll(const std::vector<EmbeddingTable*>& tables, const Parallel& parallel) {
  for (EmbeddingTable* table : tables) {
    {
      const std::shared_lock<std::shared_mutex> lock(table->mutex());
      if (table->num_deferred() == 0) continue;
    }
    const std::unique_lock<std::shared_mutex> lock(table->mutex());
    FlushDeferred(table, parallel);
  }
}

}  // namespace

Status LookupForTraining(const std::vector<EmbeddingTable*>& tables,
                         const std::vector<FeatureView>& features,
                         const std::vector<Combiner>& combiners,
                         const std::vector<PooledOutput>& outputs, const Parallel& parallel,
                         LookupWorkspace* workspace) {
  LookupPlan* plan = &workspace->plan;
  const int64_t batch = features.empty() ? 0 : features[0].batch;
  plan->tables = tables;
  plan->batch = batch;
  plan->feature_table.clear();
  for (const FeatureView& f : features) plan->feature_table.push_back(f.table);
  const ExclusiveTableLocks locks(tables);
  try {
    const Positions positions(features);
    const int num_tables = static_cast<int>(tables.size());
    SortedKeys& sorted = workspace->sorted;
    SortByBucket(features, batch, num_tables, positions, parallel, &sorted);
    const Status room = MakeRoomForBatch(tables, sorted);
    if (!room.ok()) return room;
    plan->generations.clear();
    for (EmbeddingTable* table : tables) {
      table->NextLookupStep();
      plan->generations.push_back(table->generation());
    }
    const size_t n = sorted.key.size();
    plan->unique_begin = sorted.begin;
    plan->unique_count.assign(sorted.begin.size() - 1, 0);
    plan->unique_key.resize(n);
    plan->unique_row.resize(n);
    plan->unique_slot.resize(n);
    plan->uses_end.resize(n);
    plan->uses.resize(n);
    // Places of padding keys stay as they are: nothing reads them.
    std::vector<float*>& row_of_position = workspace->row_of_position;
    row_of_position.resize(static_cast<size_t>(positions.total));
    const std::vector<int64_t> bounds = BalancedBuckets(sorted.begin, parallel.threads);
    std::atomic<bool> is_out_of_memory{false};
    parallel.run(parallel.threads, [&](int task) {
      try {
        SlotNumbers numbers;
        std::vector<int32_t> number_of;
        for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
          const int64_t table = b / kNumShards;
          const int64_t last = std::min(bounds[task + 1], (table + 1) * kNumShards);
          ResolveBucket(tables[table], sorted, b, sorted.begin[last], &numbers, &number_of, plan,
                        &row_of_position);
        }
      } catch (const std::bad_alloc&) {
        is_out_of_memory = true;
      }
    });
    if (is_out_of_memory) return OutOfMemory("adding rows");
    ComputeScales(features, combiners, positions, parallel, &plan->scale);
    Pool(tables, features, combiners, positions, row_of_position, plan->scale, outputs, parallel);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("looking up a batch");
  }
  return OkStatus();
}

Status LookupForEvaluation(const std::vector<EmbeddingTable*>& tables,
                           const std::vector<FeatureView>& features,
                           const std::vector<Combiner>& combiners,
                           const std::vector<PooledOutput>& outputs, const Parallel& parallel) {
  const int64_t batch = features.empty() ? 0 : features[0].batch;
  const int64_t cells = static_cast<int64_t>(features.size()) * batch;
  FlushAll(tables, parallel);
  const SharedTableLocks locks(tables);
  std::atomic<bool> is_out_of_memory{false};
  parallel.run(parallel.threads, [&](int task) {
    try {
      std::vector<float> initial;
      const CellRange range = CellsOf(task, parallel.threads, cells);
      for (int64_t cell = range.begin; cell < range.end; ++cell) {
        const int f = static_cast<int>(cell / batch);
        const int64_t i = cell - f * batch;
        const FeatureView& view = features[f];
        const EmbeddingTable& table = *tables[view.table];
        if (view.row_splits == nullptr && i + kPrefetchDistance < batch && view.width > 0) {
          table.Prefetch(HashKey(view.keys[view.begin(i + kPrefetchDistance)]));
        }
        initial.resize(static_cast<size_t>(table.dim()));
        const bool is_unscaled = IsUnscaled(view, combiners[f]);
        const float factor = is_unscaled ? 1.f : BagFactor(view, combiners[f], i);
        PoolExample(
            view, i, table.dim(), is_unscaled,
            [&](int64_t p) -> const float* {
              const int64_t key = view.keys[p];
              const float* row = table.Find(key, HashKey(key));
              if (row != nullptr) return row;
              table.options().initializer.Fill(key, table.dim(), initial.data());
              return initial.data();
            },
            [&](int64_t p) { return factor * (view.weights == nullptr ? 1.f : view.weights[p]); },
            outputs[f].data + i * outputs[f].stride);
      }
    } catch (const std::bad_alloc&) {
      is_out_of_memory = true;
    }
  });
  return is_out_of_memory ? OutOfMemory("looking up a batch") : OkStatus();
}

}  // namespace slipstream
