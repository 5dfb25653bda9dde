#include "cc_ops/core/update/gradient_update.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <new>
#include <string>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"
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

// Checks the gradients in the order of their memory.
bool AllFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
               const Parallel& parallel) {
  const bool is_stacked = IsStacked(plan, gradients);
  std::atomic<bool> all_finite{true};
  parallel.run(parallel.threads, [&](int task) {
    bool is_finite = true;
    for (size_t f = 0; f < gradients.size(); ++f) {
      const CellRange range = CellsOf(task, parallel.threads, plan.examples[f]);
      const int64_t stride = gradients[f].stride;
      const float* first = gradients[f].data + range.begin * stride;
      const int64_t dim = plan.tables[plan.feature_table[f]]->dim();
      if (is_stacked || stride == dim) {
        is_finite &= RowIsFinite(first, (range.end - range.begin) * stride);
        if (is_stacked) break;
        continue;
      }
      for (int64_t i = 0; i < range.end - range.begin; ++i) {
        is_finite &= RowIsFinite(first + i * stride, dim);
      }
    }
    if (!is_finite) all_finite = false;
  });
  return all_finite;
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
    update.table->options().rule.Update(update.rates, dim, summed, row);
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

// Updates the rows of the buckets' shards that are not in the batch, if the table requires it.
void SweepBuckets(const LookupPlan& plan, CellRange buckets,
                  const std::vector<TableUpdate>& updates, SweepScratch* scratch) {
  for (int64_t b = buckets.begin; b < buckets.end; ++b) {
    const size_t t = static_cast<size_t>(b / kNumShards);
    if (!IsSwept(*plan.tables[t])) continue;
    ShardSweep sweep(plan.tables[t], b % kNumShards, scratch);
    const CellRange keys = KeysOf(plan, b);
    for (int64_t u = keys.begin; u < keys.end; ++u) sweep.Exclude(plan.unique_key[u]);
    sweep.UpdateOthers(updates[t].rates);
  }
}

}  // namespace

// Tests bits, which compilers vectorize, unlike an ordered sum of floats.
SLIPSTREAM_SIMD_CLONES bool RowIsFinite(const float* row, int64_t dim) {
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t is_bad = 0;
  for (int64_t j = 0; j < dim; ++j) {
    uint32_t bits;
    std::memcpy(&bits, row + j, sizeof(bits));
    is_bad |= (bits & kExponent) == kExponent;
  }
  return is_bad == 0;
}

Status CheckFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                   const LearningRates& rates, const Parallel& parallel) {
  const Status status = rates.Check(plan.tables.size());
  if (!status.ok()) return status;
  return AllFinite(plan, gradients, parallel) ? OkStatus() : DescribeNonFinite(plan, gradients);
}

Status ApplyGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                      const LearningRates& rates, const Parallel& parallel) {
  Status status = CheckFinite(plan, gradients, rates, parallel);
  for (size_t t = 0; t < plan.tables.size() && status.ok(); ++t) {
    status = plan.tables[t]->CheckRate(rates.Of(t));
  }
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(plan.tables);
  try {
    status = LoadForUpdate(plan, /*with_due=*/true, parallel);
    if (!status.ok()) return status;
    // Allocate everything first, so that either all rows or none are updated.
    std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch(plan.tables));
    std::vector<TableUpdate> updates(plan.tables.size());
    DeferredOfKeys deferred(plan);
    const bool is_any_swept = std::any_of(plan.tables.begin(), plan.tables.end(),
                                          [](const EmbeddingTable* t) { return IsSwept(*t); });
    std::vector<SweepScratch> sweeps;
    for (int task = 0; is_any_swept && task < parallel.threads; ++task) {
      sweeps.emplace_back(plan.tables);
    }
    const std::vector<int64_t> bounds = BalancedBuckets(plan.unique_begin, parallel.threads);
    const std::function<void(int)> update_buckets = [&](int task) {
      const CellRange buckets = {bounds[task], bounds[task + 1]};
      deferred.Find(buckets);
      UpdateBuckets(plan, gradients, buckets, &updates,
                    [&](const BucketUpdate& update, int64_t next) {
                      UpdateBucket(update, next, deferred, &scratches[task]);
                    });
    };
    const std::function<void(int)> sweep_buckets = [&](int task) {
      const CellRange buckets =
          CellsOf(task, parallel.threads, static_cast<int64_t>(plan.unique_count.size()));
      SweepBuckets(plan, buckets, updates, &sweeps[task]);
    };
    for (size_t t = 0; t < updates.size(); ++t) {
      updates[t].Begin(plan, t, plan.tables[t]->BeginUpdate(rates.Of(t)));
    }
    parallel.run(parallel.threads, update_buckets);
    if (is_any_swept) parallel.run(parallel.threads, sweep_buckets);
    for (size_t t = 0; t < updates.size(); ++t) {
      plan.tables[t]->updates().AddDropped(updates[t].dropped);
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("updating rows", plan.tables);
  }
  return OkStatus();
}

}  // namespace slipstream
