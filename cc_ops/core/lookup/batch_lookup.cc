#include "cc_ops/core/lookup/batch_lookup.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/eviction.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"

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
  return EvictFor(std::move(wanted), "a batch needs");
}

// Whether every example's pooled vector is its row: one unweighted key each.
bool IsCopied(const FeatureView& view, Combiner combiner) {
  return view.row_splits == nullptr && view.width == 1 && IsUnscaled(view, combiner);
}

// Where rows go at once. Features whose vectors are pooled from rows have no data.
std::vector<PooledOutput> CopiesOf(const std::vector<FeatureView>& features,
                                   const std::vector<Combiner>& combiners,
                                   const std::vector<PooledOutput>& outputs) {
  std::vector<PooledOutput> copied(features.size());
  for (size_t f = 0; f < features.size(); ++f) {
    if (IsCopied(features[f], combiners[f])) copied[f] = outputs[f];
  }
  return copied;
}

// Examples without a key have vectors of zeros.
void ClearPadding(const FeatureView& view, int64_t dim, const PooledOutput& output) {
  for (int64_t i = 0; i < view.batch; ++i) {
    if (!view.is_key(view.begin(i))) std::fill_n(output.data + i * output.stride, dim, 0.f);
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

// Pools the features whose vectors are no copies.
void Pool(const std::vector<EmbeddingTable*>& tables, const std::vector<FeatureView>& features,
          const std::vector<Combiner>& combiners, const Positions& positions,
          const std::vector<float*>& row_of_position, const std::vector<float>& scale,
          const std::vector<PooledOutput>& outputs, const Parallel& parallel) {
  const int tasks = parallel.threads;
  const Cells cells(features);
  parallel.run(tasks, [&](int task) {
    cells.ForEachFeature(task, tasks, [&](int f, int64_t first, int64_t last) {
      const FeatureView& view = features[f];
      if (IsCopied(view, combiners[f])) return;
      const int64_t dim = tables[view.table]->dim();
      const float of_table = tables[view.table]->rows().scale();
      const bool is_unscaled = IsUnscaled(view, combiners[f]) && of_table == 1.f;
      for (int64_t i = first; i < last; ++i) {
        PoolExample(
            view, i, dim, is_unscaled,
            [&](int64_t p) { return row_of_position[positions.of(f, i, p)]; },
            [&](int64_t p) {
              return scale.empty() ? of_table : of_table * scale[positions.of(f, i, p)];
            },
            outputs[f].data + i * outputs[f].stride);
      }
    });
  });
}

}  // namespace

Status LookupForTraining(const std::vector<EmbeddingTable*>& tables,
                         const std::vector<FeatureView>& features,
                         const std::vector<Combiner>& combiners,
                         const std::vector<PooledOutput>& outputs, const Parallel& parallel,
                         LookupWorkspace* workspace) {
  LookupPlan* plan = &workspace->plan;
  for (const FeatureView& f : features) {
    if (f.batch <= kMaxBatch) continue;
    return InvalidArgument("a batch has " + std::to_string(f.batch) + " examples; allowed: up to " +
                           std::to_string(kMaxBatch));
  }
  plan->tables = tables;
  plan->examples.clear();
  plan->feature_table.clear();
  for (const FeatureView& f : features) {
    plan->examples.push_back(f.batch);
    plan->feature_table.push_back(f.table);
  }
  const ExclusiveTableLocks locks(tables);
  try {
    const Positions positions(features);
    const int num_tables = static_cast<int>(tables.size());
    SortedKeys& sorted = workspace->sorted;
    RowTargets targets = {CopiesOf(features, combiners, outputs), nullptr};
    const bool all_are_copied =
        std::all_of(targets.copied.begin(), targets.copied.end(),
                    [](const PooledOutput& o) { return o.data != nullptr; });
    SortByBucket(features, num_tables, positions, !all_are_copied, parallel, &sorted);
    const Status room = MakeRoomForBatch(tables, sorted);
    if (!room.ok()) return room;
    plan->generations.clear();
    for (EmbeddingTable* table : tables) {
      table->rows().NextLookupStep();
      plan->generations.push_back(table->rows().generation());
    }
    const size_t n = sorted.key.size();
    plan->unique_begin = sorted.begin;
    plan->unique_count.assign(sorted.begin.size() - 1, 0);
    plan->unique_key.resize(n);
    plan->unique_row.resize(n);
    plan->unique_index.resize(n);
    plan->uses_end.resize(n);
    plan->uses.resize(n);
    plan->use_position.resize(sorted.position.size());
    if (!all_are_copied) {
      // Places of padding keys stay as they are: nothing reads them.
      workspace->row_of_position.resize(static_cast<size_t>(positions.total));
      targets.row_of_position = &workspace->row_of_position;
    }
    workspace->scratches.resize(static_cast<size_t>(parallel.threads));
    const std::vector<int64_t> bounds = BalancedBuckets(sorted.begin, parallel.threads);
    parallel.run(parallel.threads, [&](int task) {
      ResolveBuckets(sorted, bounds[task], bounds[task + 1], targets, &workspace->scratches[task],
                     plan);
    });
    plan->scale.clear();
    if (static_cast<int64_t>(n) < positions.total) {
      for (size_t f = 0; f < features.size(); ++f) {
        if (targets.copied[f].data == nullptr || !features[f].has_padding) continue;
        ClearPadding(features[f], tables[features[f].table]->dim(), outputs[f]);
      }
    }
    if (all_are_copied) return OkStatus();
    ComputeScales(features, combiners, positions, parallel, &plan->scale);
    Pool(tables, features, combiners, positions, workspace->row_of_position, plan->scale, outputs,
         parallel);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("looking up a batch", tables);
  }
  return OkStatus();
}

Status LookupForEvaluation(const std::vector<EmbeddingTable*>& tables,
                           const std::vector<FeatureView>& features,
                           const std::vector<Combiner>& combiners,
                           const std::vector<PooledOutput>& outputs, const Parallel& parallel) {
  const SharedTableLocks locks(tables);
  try {
    const Cells cells(features);
    const auto look_up = [&](int f, int64_t first, int64_t last) {
      const FeatureView& view = features[f];
      const EmbeddingTable& table = *tables[view.table];
      std::vector<float> initial(static_cast<size_t>(table.dim()));
      const bool is_unscaled = IsUnscaled(view, combiners[f]);
      for (int64_t i = first; i < last; ++i) {
        if (view.row_splits == nullptr && i + kPrefetchDistance < view.batch && view.width > 0) {
          table.rows().Prefetch(view.keys[view.begin(i + kPrefetchDistance)]);
        }
        const float factor = is_unscaled ? 1.f : BagFactor(view, combiners[f], i);
        PoolExample(
            view, i, table.dim(), is_unscaled,
            [&](int64_t p) -> const float* {
              const int64_t key = view.keys[p];
              const float* row = table.rows().Find(key);
              if (row != nullptr && table.rows().scale() == 1.f) return row;
              table.rows().CopyRow(key, row, initial.data());
              return initial.data();
            },
            [&](int64_t p) { return factor * (view.weights == nullptr ? 1.f : view.weights[p]); },
            outputs[f].data + i * outputs[f].stride);
      }
    };
    parallel.run(parallel.threads,
                 [&](int task) { cells.ForEachFeature(task, parallel.threads, look_up); });
  } catch (const std::bad_alloc&) {
    return OutOfMemory("looking up a batch", tables);
  }
  return OkStatus();
}

}  // namespace slipstream
