#include "cc_ops/core/update/gradient_update.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <string>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"
#include "cc_ops/core/update/checked_update.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/core/update/row_sweep.h"
#include "cc_ops/core/update/rule_loop.h"
#include "cc_ops/core/update/update_loop.h"

namespace slipstream {
namespace {

// Returns an error that names the first gradient that is not finite.
Status DescribeNonFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients) {
  for (size_t f = 0; f < gradients.size(); ++f) {
    const EmbeddingTable& table = *plan.tables[plan.feature_table[f]];
    for (int64_t i = 0; i < plan.examples[f]; ++i) {
      for (int64_t j = 0; j < table.dim(); ++j) {
        const float value = gradients[f].data[i * gradients[f].stride + j];
        if (value - value != 0.f) {
          return InvalidArgument(
              "the gradient of feature " + std::to_string(f) + " (table '" + table.options().name +
              "') is " + std::to_string(value) + " in example " + std::to_string(i) + ", element " +
              std::to_string(j) + "; expected finite values. No row was updated");
        }
      }
    }
  }
  return OkStatus();
}

// Returns whether the gradients of all features are adjacent for each example, as in one tensor of
// all features.
bool IsStacked(const LookupPlan& plan, const std::vector<PooledGradient>& gradients) {
  int64_t offset = 0;
  for (size_t f = 0; f < gradients.size(); ++f) {
    if (gradients[f].data != gradients[0].data + offset) return false;
    offset += plan.tables[plan.feature_table[f]]->dim();
  }
  return std::all_of(gradients.begin(), gradients.end(),
                     [&](const PooledGradient& g) { return g.stride == offset; });
}

// Returns the largest magnitude of the gradients, read in the order of their memory; a NaN or
// infinity if there is one.
float LargestGradient(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                      const Parallel& parallel) {
  const bool is_stacked = IsStacked(plan, gradients);
  std::vector<float> of_task(static_cast<size_t>(parallel.threads), 0.f);
  parallel.run(parallel.threads, [&](int task) {
    float largest[] = {0.f, 0.f};
    const auto add = [&](const float* values, int64_t n) {
      largest[1] = LargestMagnitude(values, n);
      largest[0] = LargestMagnitude(largest, 2);
    };
    for (size_t f = 0; f < gradients.size(); ++f) {
      const CellRange range = CellsOf(task, parallel.threads, plan.examples[f]);
      const int64_t stride = gradients[f].stride;
      const float* first = gradients[f].data + range.begin * stride;
      const int64_t dim = plan.tables[plan.feature_table[f]]->dim();
      if (is_stacked || stride == dim) {
        add(first, (range.end - range.begin) * stride);
        if (is_stacked) break;
        continue;
      }
      for (int64_t i = 0; i < range.end - range.begin; ++i) add(first + i * stride, dim);
    }
    of_task[task] = largest[0];
  });
  return LargestMagnitude(of_task.data(), parallel.threads);
}

// Same, if rows may have been removed since the lookup.
void UpdateStaleRows(const BucketUpdate& update, int64_t next, RowScratch* scratch) {
  const LookupPlan& plan = *update.plan;
  const RowLayout& layout = update.table->rows().layout();
  const int64_t dim = layout.dim;
  float* const summed = scratch->sum.data();
  const CellRange keys = KeysOf(plan, update.bucket);
  UpdateCounts* const counts = CountsOf(update);
  counts->offered += keys.end - keys.begin;
  counts->sent += keys.end - keys.begin;
  const auto prefetch = [](int64_t /*u*/, bool /*is_next*/) {};
  UpdateEachKey(update, next, prefetch, [&](int64_t u, int64_t first_use, FoundRow found) {
    if (found.row == nullptr) {
      ++*update.dropped;
      return;
    }
    SumUses(plan, *update.gradients, first_use, plan.uses_end[u], dim, summed);
    update.table->rows().Change(static_cast<int>(update.bucket % kNumShards), found.index);
    float* const row = layout.Open(found.row, scratch->copy.data());
    UpdateOpened(update.table, update.rates, summed, row, update.shard());
    layout.Close(row, plan.unique_key[u], update.rates.rounding, found.row);
  });
}

// Marks all rows of the bucket as changed.
void ChangeRows(const BucketUpdate& update) {
  const int shard = static_cast<int>(update.bucket % kNumShards);
  const CellRange keys = KeysOf(*update.plan, update.bucket);
  for (int64_t u = keys.begin; u < keys.end; ++u) {
    if (update.plan->unique_row[u] == nullptr) continue;
    update.table->rows().Change(shard, update.plan->unique_index[u]);
  }
}

// Updates the rows of a bucket under the table's policy. next: the thread's following bucket.
void UpdateBucket(const BucketUpdate& update, int64_t next, const DeferredOfKeys& deferred,
                  PolicyScratch* scratch) {
  const EmbeddingTable& table = *update.table;
  const UpdatePolicy& policy = table.updates().policy();
  const bool by_policy = table.UpdatesByPolicy(update.bucket % kNumShards);
  const bool is_plain = !by_policy && !table.options().rule.transforms.any();
  const bool is_narrow = !table.rows().layout().is_floats();
  const bool is_apart = policy.mode == UpdatePolicy::Mode::kDefer || policy.ranks > 1;
  const bool is_in_order = is_plain || !(is_narrow || (by_policy && is_apart));
  if (table.rows().tracks_changes() && !update.is_stale && is_in_order) ChangeRows(update);
  if (update.is_stale && !by_policy) {
    UpdateStaleRows(update, next, &scratch->row);
  } else if (is_plain && is_narrow) {
    UpdateNarrowRows(update, next, &scratch->row);
  } else if (is_plain) {
    UpdatePlainRows(update, next, &scratch->row);
  } else if (is_narrow || (by_policy && (is_apart || update.is_stale))) {
    UpdateBucketByPolicy(update, next, deferred, scratch);
  } else {
    UpdateRowsWithAll(update, next, &scratch->row);
  }
}

// Returns the distinct keys of a table in the batch.
std::vector<int64_t> KeysOfTable(const LookupPlan& plan, size_t table) {
  std::vector<int64_t> found;
  for (size_t b = table * kNumShards; b < (table + 1) * kNumShards; ++b) {
    const CellRange keys = KeysOf(plan, static_cast<int64_t>(b));
    found.insert(found.end(), plan.unique_key.begin() + keys.begin,
                 plan.unique_key.begin() + keys.end);
  }
  return found;
}

// Updates the rows of the buckets' shards that are not in the batch, if the table requires it.
// is_checked: TableUpdate::is_checked of the tables to update.
void SweepBuckets(const LookupPlan& plan, CellRange buckets,
                  const std::vector<TableUpdate>& updates, bool is_checked, SweepScratch* scratch) {
  for (int64_t b = buckets.begin; b < buckets.end; ++b) {
    const size_t t = static_cast<size_t>(b / kNumShards);
    if (!IsSwept(*plan.tables[t]) || updates[t].is_checked != is_checked) continue;
    ShardSweep sweep(plan.tables[t], b % kNumShards, scratch);
    const CellRange keys = KeysOf(plan, b);
    for (int64_t u = keys.begin; u < keys.end; ++u) sweep.Exclude(plan.unique_key[u]);
    sweep.UpdateOthers(updates[t].rates);
  }
}

}  // namespace

SLIPSTREAM_SIMD_CLONES float LargestMagnitude(const float* values, int64_t n) {
  return Largest(n, [values](int64_t j) SLIPSTREAM_LAMBDA_INLINE { return std::fabs(values[j]); });
}

bool RowIsFinite(const float* row, int64_t dim) {
  return std::isfinite(LargestMagnitude(row, dim));
}

Status CheckFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                   const LearningRates& rates, const Parallel& parallel, float* largest) {
  const Status status = rates.Check(plan.tables.size());
  if (!status.ok()) return status;
  *largest = LargestGradient(plan, gradients, parallel);
  return std::isfinite(*largest) ? OkStatus() : DescribeNonFinite(plan, gradients);
}

Status ApplyGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                      const LearningRates& rates, const Parallel& parallel) {
  float largest = 0.f;
  Status status = CheckFinite(plan, gradients, rates, parallel, &largest);
  const size_t num_tables = plan.tables.size();
  for (size_t t = 0; t < num_tables && status.ok(); ++t) {
    status = plan.tables[t]->CheckRate(rates.Of(t));
  }
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(plan.tables);
  try {
    status = LoadForUpdate(plan, /*with_due=*/true, parallel);
    if (!status.ok()) return status;
    const SumBounds bounds(plan, largest);
    status = bounds.CheckSums(gradients);
    if (!status.ok()) return status;
    // Allocate everything first, so that either all rows or none are updated.
    std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch(plan.tables));
    std::vector<TableUpdate> updates(num_tables);
    std::vector<TableBackup> backups;
    for (size_t t = 0; t < num_tables; ++t) {
      EmbeddingTable* const table = plan.tables[t];
      updates[t].is_checked = !SurelyFits(*table, table->NextRates(rates.Of(t)), bounds.Applied(t));
      if (updates[t].is_checked) backups.emplace_back(table, KeysOfTable(plan, t));
    }
    DeferredOfKeys deferred(plan);
    const bool is_any_swept = std::any_of(plan.tables.begin(), plan.tables.end(),
                                          [](const EmbeddingTable* t) { return IsSwept(*t); });
    std::vector<SweepScratch> sweeps;
    for (int task = 0; is_any_swept && task < parallel.threads; ++task) {
      sweeps.emplace_back(plan.tables);
    }
    const std::vector<int64_t> task_begin = BalancedBuckets(plan.unique_begin, parallel.threads);
    bool is_checked = false;  // Which of the tables the functions update.
    const std::function<void(int)> update_buckets = [&](int task) {
      const CellRange buckets = {task_begin[task], task_begin[task + 1]};
      deferred.Find(buckets);
      UpdateBuckets(plan, gradients, buckets, &updates,
                    [&](const BucketUpdate& update, int64_t next) {
                      if (updates[update.bucket / kNumShards].is_checked != is_checked) return;
                      UpdateBucket(update, next, deferred, &scratches[task]);
                    });
    };
    const std::function<void(int)> sweep_buckets = [&](int task) {
      const CellRange buckets =
          CellsOf(task, parallel.threads, static_cast<int64_t>(plan.unique_count.size()));
      SweepBuckets(plan, buckets, updates, is_checked, &sweeps[task]);
    };
    const auto update_tables = [&] {
      for (size_t t = 0; t < num_tables; ++t) {
        if (updates[t].is_checked != is_checked) continue;
        updates[t].Begin(plan, t, plan.tables[t]->BeginUpdate(rates.Of(t)));
      }
      parallel.run(parallel.threads, update_buckets);
      if (is_any_swept) parallel.run(parallel.threads, sweep_buckets);
    };
    if (!backups.empty()) {
      is_checked = true;
      update_tables();
      status = CheckOrRestore(&backups);
      if (!status.ok()) return status;
      is_checked = false;
    }
    if (backups.size() < num_tables) update_tables();
    for (size_t t = 0; t < num_tables; ++t) {
      plan.tables[t]->updates().AddDropped(updates[t].dropped);
      plan.tables[t]->updates().set_deferred_bound(bounds.Deferred(t));
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("updating rows", plan.tables);
  }
  return OkStatus();
}

}  // namespace slipstream
