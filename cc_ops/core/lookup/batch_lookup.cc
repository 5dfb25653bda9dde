#include "cc_ops/core/lookup/batch_lookup.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <utility>

#include "cc_ops/core/base/float_bits.h"
#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/eviction.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"

namespace slipstream {
namespace {

constexpr int64_t kPrefetchDistance = 8;

// Evicts rows from bounded tables that would overflow with the new keys of the batch.
Status MakeRoomForBatch(const std::vector<EmbeddingTable*>& tables, const SortedKeys& sorted,
                        bool joins_step) {
  std::vector<WantedKeys> wanted;
  for (size_t t = 0; t < tables.size(); ++t) {
    const int64_t begin = sorted.begin[t * kNumShards], end = sorted.begin[(t + 1) * kNumShards];
    if (!MayOverflow(*tables[t], end - begin)) continue;
    wanted.push_back(
        {tables[t], {sorted.key.begin() + begin, sorted.key.begin() + end}, /*is_access=*/true});
    if (joins_step) tables[t]->AppendStepKeys(&wanted.back().keys);
  }
  return EvictFor(std::move(wanted), "a batch needs");
}

// Whether the pooled vector of each example is its row: one unweighted key per example.
bool IsCopied(const FeatureView& view, Combiner combiner) {
  return view.row_splits == nullptr && view.width == 1 && IsUnscaled(view, combiner);
}

// Returns the outputs to which rows are copied directly; null for features that are pooled.
std::vector<PooledOutput> CopiesOf(const std::vector<FeatureView>& features,
                                   const std::vector<Combiner>& combiners,
                                   const std::vector<PooledOutput>& outputs) {
  std::vector<PooledOutput> copied(features.size());
  for (size_t f = 0; f < features.size(); ++f) {
    if (IsCopied(features[f], combiners[f])) copied[f] = outputs[f];
  }
  return copied;
}

// Zeros the vectors of examples without a key.
void ClearPadding(const FeatureView& view, int64_t dim, const PooledOutput& output) {
  for (int64_t i = 0; i < view.batch; ++i) {
    if (!view.is_key(view.begin(i))) std::fill_n(output.data + i * output.stride, dim, 0.f);
  }
}

// Fills scale[position] for features that need it; leaves it empty if none does. Returns the
// largest magnitude, at least 1; a NaN or infinity if there is one.
float ComputeScales(const std::vector<FeatureView>& features,
                    const std::vector<Combiner>& combiners, const Positions& positions,
                    const Parallel& parallel, std::vector<float>* scale) {
  scale->clear();
  bool is_needed = false;
  for (size_t f = 0; f < features.size(); ++f) {
    is_needed = is_needed || !IsUnscaled(features[f], combiners[f]);
  }
  if (!is_needed) return 1.f;
  // The bits of magnitudes have the order of the magnitudes, followed by infinity and NaNs.
  std::atomic<uint32_t> max_bits{BitsOf(1.f)};
  scale->assign(static_cast<size_t>(positions.total), 1.f);
  const int tasks = parallel.threads;
  for (size_t f = 0; f < features.size(); ++f) {
    const FeatureView& view = features[f];
    if (IsUnscaled(view, combiners[f])) continue;
    parallel.run(tasks, [&](int task) {
      const CellRange range = CellsOf(task, tasks, view.batch);
      uint32_t bits = 0;
      for (int64_t i = range.begin; i < range.end; ++i) {
        const float factor = BagFactor(view, combiners[f], i);
        for (int64_t p = view.begin(i); p < view.end(i); ++p) {
          const float weight = view.weights == nullptr ? 1.f : view.weights[p];
          const float own = weight * factor;
          (*scale)[positions.of(static_cast<int>(f), i, p)] = own;
          if (view.is_key(p)) bits = std::max(bits, BitsOf(own) & 0x7fffffffu);
        }
      }
      uint32_t others = max_bits;
      while (others < bits && !max_bits.compare_exchange_weak(others, bits)) {
      }
    });
  }
  return FloatOf(max_bits);
}

// Pools the features that are not copied.
void Pool(const std::vector<EmbeddingTable*>& tables, const std::vector<FeatureView>& features,
          const std::vector<Combiner>& combiners, const Positions& positions,
          const std::vector<const float*>& row_of_position, const std::vector<float>& scale,
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

bool AllAreCopied(const std::vector<FeatureView>& features,
                  const std::vector<Combiner>& combiners) {
  for (size_t f = 0; f < features.size(); ++f) {
    if (!IsCopied(features[f], combiners[f])) return false;
  }
  return true;
}

// Returns the destinations of rows and allocates copies in `workspace` where needed.
RowTargets TargetsOf(const std::vector<FeatureView>& features,
                     const std::vector<Combiner>& combiners,
                     const std::vector<PooledOutput>& outputs, LookupWorkspace* workspace) {
  RowTargets targets;
  targets.copied = CopiesOf(features, combiners, outputs);
  if (AllAreCopied(features, combiners)) return targets;
  // Entries of padding keys are not set, because they are never read.
  workspace->row_of_position.resize(static_cast<size_t>(Positions(features).total));
  targets.row_of_position = &workspace->row_of_position;
  for (const EmbeddingTable* table : workspace->plan.tables) {
    const RowLayout& layout = table->rows().layout();
    if (layout.dtype == RowDtype::kFloat32 && !table->rows().admits()) continue;
    targets.copy_dim = std::max(targets.copy_dim, layout.dim);
  }
  workspace->copies.resize(workspace->plan.unique_key.size() *
                           static_cast<size_t>(targets.copy_dim));
  targets.copies = workspace->copies.data();
  return targets;
}

// Calls fn(feature, dim, output) for copied features that may have examples without a key.
template <class Fn>
void ForEachPaddedCopy(const std::vector<FeatureView>& features, const RowTargets& targets,
                       const LookupWorkspace& workspace, const Fn& fn) {
  const LookupPlan& plan = workspace.plan;
  if (static_cast<int64_t>(plan.unique_key.size()) == Positions(features).total) return;
  for (size_t f = 0; f < features.size(); ++f) {
    if (targets.copied[f].data == nullptr || !features[f].has_padding) continue;
    fn(features[f], plan.tables[features[f].table]->dim(), targets.copied[f]);
  }
}

// Pools the rows that are already at `targets`.
void PoolRows(const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
              const std::vector<PooledOutput>& outputs, const RowTargets& targets,
              const Parallel& parallel, LookupWorkspace* workspace) {
  LookupPlan* plan = &workspace->plan;
  const Positions positions(features);
  plan->scale.clear();
  plan->max_scale = 1.f;
  if (targets.row_of_position == nullptr) return;
  plan->max_scale = ComputeScales(features, combiners, positions, parallel, &plan->scale);
  Pool(plan->tables, features, combiners, positions, workspace->row_of_position, plan->scale,
       outputs, parallel);
}

// Loads the rows of a plan that are on disk.
Status LoadMissing(const Parallel& parallel, LookupPlan* plan) {
  for (size_t t = 0; t < plan->tables.size(); ++t) {
    RowStore& rows = plan->tables[t]->rows();
    if (rows.spilled() == nullptr) continue;
    std::vector<std::vector<int64_t>> missing(kNumShards);
    const auto for_each_missing = [&](const auto& fn) {
      for (int s = 0; s < kNumShards; ++s) {
        const int64_t bucket = static_cast<int64_t>(t) * kNumShards + s;
        const int64_t begin = plan->unique_begin[bucket];
        for (int64_t u = begin; u < begin + plan->unique_count[bucket]; ++u) {
          if (plan->unique_row[u] == nullptr && plan->unique_index[u] != HashIndex::kEmpty) {
            fn(s, u);
          }
        }
      }
    };
    for_each_missing([&](int s, int64_t u) { missing[s].push_back(plan->unique_key[u]); });
    const Status status = rows.spilled()->Load(missing, /*must_fit=*/true, parallel);
    if (!status.ok()) return status;
    for_each_missing([&](int s, int64_t u) {
      plan->unique_row[u] = rows.Find(plan->unique_key[u], &plan->unique_index[u]);
      rows.SetLastUsed(s, plan->unique_index[u]);
    });
    plan->generations[t] = rows.addresses();
  }
  return OkStatus();
}

// Returns InvalidArgument unless the keys of a batch fit in the memory of tables that spill.
Status CheckMemory(const std::vector<EmbeddingTable*>& tables, const SortedKeys& sorted) {
  for (size_t t = 0; t < tables.size(); ++t) {
    const SpilledRows* const spilled = tables[t]->rows().spilled();
    const int64_t begin = sorted.begin[t * kNumShards], end = sorted.begin[(t + 1) * kNumShards];
    if (spilled == nullptr || end - begin <= spilled->max_rows()) continue;
    std::vector<int64_t> keys(sorted.key.begin() + begin, sorted.key.begin() + end);
    std::sort(keys.begin(), keys.end());
    const int64_t distinct = std::unique(keys.begin(), keys.end()) - keys.begin();
    if (distinct <= spilled->max_rows()) continue;
    return ResourceExhausted("a batch needs " + std::to_string(distinct) + " rows of table '" +
                             tables[t]->options().name + "' at once, but its memory of " +
                             std::to_string(tables[t]->options().memory) + " bytes holds " +
                             std::to_string(spilled->max_rows()) +
                             " rows. Increase `memory` or reduce the batch size");
  }
  return OkStatus();
}

// Calls resolve(first bucket, last bucket, task) so that the threads cover all buckets.
template <class Resolve>
void ForEachBucketRange(const SortedKeys& sorted, const Parallel& parallel,
                        const Resolve& resolve) {
  const std::vector<int64_t> bounds = BalancedBuckets(sorted.begin, parallel.threads);
  parallel.run(parallel.threads, [&](int task) { resolve(bounds[task], bounds[task + 1], task); });
}

// Loads the rows of a batch that are on disk.
Status LoadBatch(const std::vector<EmbeddingTable*>& tables,
                 const std::vector<FeatureView>& features, const Parallel& parallel) {
  for (size_t t = 0; t < tables.size(); ++t) {
    if (tables[t]->rows().spilled() == nullptr) continue;
    std::vector<int64_t> keys;
    for (const FeatureView& view : features) {
      if (static_cast<size_t>(view.table) != t) continue;
      for (int64_t i = 0; i < view.batch; ++i) {
        keys.insert(keys.end(), view.keys + view.begin(i), view.keys + view.end(i));
      }
    }
    const Status status = tables[t]->rows().LoadRow(keys.data(), static_cast<int64_t>(keys.size()),
                                                    /*reads=*/true, "a batch needs", parallel);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

}  // namespace

std::vector<int64_t> LayoutOf(const std::vector<FeatureView>& features,
                              const std::vector<Combiner>& combiners) {
  std::vector<int64_t> layout;
  for (size_t f = 0; f < features.size(); ++f) {
    const FeatureView& view = features[f];
    layout.insert(layout.end(), {view.table, view.batch, view.num_keys, view.width, view.stride,
                                 view.row_splits != nullptr, IsCopied(view, combiners[f]),
                                 view.has_padding, view.has_padding ? view.padding_key : 0});
  }
  return layout;
}

Status SortKeys(const std::vector<EmbeddingTable*>& tables,
                const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                const Parallel& parallel, LookupWorkspace* workspace) {
  for (const FeatureView& f : features) {
    if (f.batch <= kMaxBatch) continue;
    return InvalidArgument("a feature has " + std::to_string(f.batch) +
                           " examples (keys if it is not pooled); expected at most " +
                           std::to_string(kMaxBatch) + ". Reduce the batch size");
  }
  LookupPlan* plan = &workspace->plan;
  plan->tables = tables;
  plan->generations.assign(tables.size(), -1);
  plan->scale.clear();
  plan->examples.clear();
  plan->feature_table.clear();
  for (const FeatureView& f : features) {
    plan->examples.push_back(f.batch);
    plan->feature_table.push_back(f.table);
  }
  SortedKeys& sorted = workspace->sorted;
  SortByBucket(features, static_cast<int>(tables.size()), Positions(features),
               !AllAreCopied(features, combiners), parallel, &sorted);
  const size_t n = sorted.key.size();
  plan->unique_begin = sorted.begin;
  plan->unique_count.assign(sorted.begin.size() - 1, 0);
  plan->unique_key.resize(n);
  plan->unique_row.resize(n);
  plan->unique_index.resize(n);
  plan->uses_end.resize(n);
  plan->uses.resize(n);
  plan->use_position.resize(sorted.position.size());
  workspace->scratches.resize(static_cast<size_t>(parallel.threads));
  return OkStatus();
}

void GroupKeys(const Parallel& parallel, LookupWorkspace* workspace) {
  ForEachBucketRange(workspace->sorted, parallel, [&](int64_t first, int64_t last, int task) {
    GroupBuckets(workspace->sorted, first, last, &workspace->scratches[task], &workspace->plan);
  });
}

Status BeginLookup(LookupWorkspace* workspace, bool joins_step) {
  static std::atomic<int64_t> num_lookups{0};
  LookupPlan* plan = &workspace->plan;
  const Status memory = CheckMemory(plan->tables, workspace->sorted);
  if (!memory.ok()) return memory;
  const Status room = MakeRoomForBatch(plan->tables, workspace->sorted, joins_step);
  if (!room.ok()) return room;
  plan->number = ++num_lookups;
  workspace->is_collected = false;
  plan->generations.clear();
  plan->update_steps.clear();
  const SortedKeys& sorted = workspace->sorted;
  for (size_t t = 0; t < plan->tables.size(); ++t) {
    EmbeddingTable* const table = plan->tables[t];
    table->BeginLookup(joins_step);
    const int64_t begin = sorted.begin[t * kNumShards], end = sorted.begin[(t + 1) * kNumShards];
    if (joins_step) table->NoteStepKeys(sorted.key.data() + begin, end - begin);
    plan->generations.push_back(table->rows().addresses());
    plan->update_steps.push_back(table->updates().step());
  }
  return OkStatus();
}

void DeliverRows(const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                 const std::vector<PooledOutput>& outputs, const Parallel& parallel,
                 LookupWorkspace* workspace) {
  const RowTargets targets = TargetsOf(features, combiners, outputs, workspace);
  std::vector<float> zeros;
  if (targets.row_of_position != nullptr) {
    int64_t dim = 0;
    for (const EmbeddingTable* table : workspace->plan.tables) dim = std::max(dim, table->dim());
    zeros.resize(static_cast<size_t>(dim));
    std::fill(targets.row_of_position->begin(), targets.row_of_position->end(), zeros.data());
  }
  ForEachPaddedCopy(features, targets, *workspace,
                    [&](const FeatureView& view, int64_t dim, const PooledOutput& out) {
                      for (int64_t i = 0; i < view.batch; ++i) {
                        std::fill_n(out.data + i * out.stride, dim, 0.f);
                      }
                    });
  ForEachBucketRange(workspace->sorted, parallel, [&](int64_t first, int64_t last, int) {
    DeliverBuckets(workspace->sorted, first, last, targets, &workspace->plan);
  });
  PoolRows(features, combiners, outputs, targets, parallel, workspace);
}

Status LookupForTraining(const std::vector<EmbeddingTable*>& tables,
                         const std::vector<FeatureView>& features,
                         const std::vector<Combiner>& combiners,
                         const std::vector<PooledOutput>& outputs, const Parallel& parallel,
                         LookupWorkspace* workspace, bool joins_step) {
  const ExclusiveTableLocks locks(tables);
  try {
    Status status = SortKeys(tables, features, combiners, parallel, workspace);
    if (!status.ok()) return status;
    status = BeginLookup(workspace, joins_step);
    if (!status.ok()) return status;
    const RowTargets targets = TargetsOf(features, combiners, outputs, workspace);
    LookupPlan* const plan = &workspace->plan;
    const SortedKeys& sorted = workspace->sorted;
    if (!AnySpilled(tables)) {
      ForEachBucketRange(sorted, parallel, [&](int64_t first, int64_t last, int task) {
        ResolveBuckets(sorted, first, last, targets, &workspace->scratches[task], plan);
      });
    } else {
      ForEachBucketRange(sorted, parallel, [&](int64_t first, int64_t last, int task) {
        FindBuckets(sorted, first, last, &workspace->scratches[task], plan);
      });
      status = LoadMissing(parallel, plan);
      if (!status.ok()) return status;
      ForEachBucketRange(sorted, parallel, [&](int64_t first, int64_t last, int) {
        DeliverBuckets(sorted, first, last, targets, plan);
      });
    }
    ForEachPaddedCopy(features, targets, *workspace, ClearPadding);
    PoolRows(features, combiners, outputs, targets, parallel, workspace);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("looking up a batch", tables);
  }
  return OkStatus();
}

Status LookupForEvaluation(const std::vector<EmbeddingTable*>& tables,
                           const std::vector<FeatureView>& features,
                           const std::vector<Combiner>& combiners,
                           const std::vector<PooledOutput>& outputs, const Parallel& parallel) {
  const ReadingTableLocks locks(tables);
  try {
    const Status status = LoadBatch(tables, features, parallel);
    if (!status.ok()) return status;
    const Cells cells(features);
    const auto look_up = [&](int f, int64_t first, int64_t last) {
      const FeatureView& view = features[f];
      const EmbeddingTable& table = *tables[view.table];
      std::vector<float> initial(static_cast<size_t>(table.dim()));
      const bool is_unscaled = IsUnscaled(view, combiners[f]);
      const bool lies_ready =
          table.rows().layout().dtype == RowDtype::kFloat32 && table.rows().scale() == 1.f;
      for (int64_t i = first; i < last; ++i) {
        if (view.row_splits == nullptr && i + kPrefetchDistance < view.batch && view.width > 0) {
          table.rows().Prefetch(view.keys[view.begin(i + kPrefetchDistance)]);
        }
        const float factor = is_unscaled ? 1.f : BagFactor(view, combiners[f], i);
        PoolExample(
            view, i, table.dim(), is_unscaled,
            [&](int64_t p) -> const float* {
              const int64_t key = view.keys[p];
              const StoredRow* row = table.rows().Find(key);
              if (row != nullptr && lies_ready) return RowLayout::Floats(row);
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
