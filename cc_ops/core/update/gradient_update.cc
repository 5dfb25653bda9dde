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
#include "cc_ops/core/update/rules/all_rules.h"
#include "cc_ops/core/update/update_loop.h"

namespace slipstream {
namespace {

// Names the first gradient that is not finite.
Status DescribeNonFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients) {
  for (size_t f = 0; f < gradients.size(); ++f) {
    const EmbeddingTable& table = *plan.tables[plan.feature_table[f]];
    for (int64_t i = 0; i < plan.examples[f]; ++i) {
      for (int64_t j = 0; j < table.dim(); ++j) {
        const float value = gradients[f].data[i * gradients[f].stride + j];
        if (value - value != 0.f) {
          return InvalidArgument("gradient of feature " + std::to_string(f) + " (table '" +
                                 table.options().name + "'), example " + std::to_string(i) +
                                 ", element " + std::to_string(j) + " is " + std::to_string(value) +
                                 "; allowed: finite values. No row was updated");
        }
      }
    }
  }
  return OkStatus();
}

// Whether the features' gradients of an example lie one behind the other, those of the next example
// after them, as in one tensor of all features.
bool IsStacked(const LookupPlan& plan, const std::vector<PooledGradient>& gradients) {
  int64_t offset = 0;
  for (size_t f = 0; f < gradients.size(); ++f) {
    if (gradients[f].data != gradients[0].data + offset) return false;
    offset += plan.tables[plan.feature_table[f]]->dim();
  }
  return std::all_of(gradients.begin(), gradients.end(),
                     [&](const PooledGradient& g) { return g.stride == offset; });
}

// Reads memory in its order.
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

ShardFlags* FlagsOfBucket(const LookupPlan& plan, int64_t bucket) {
  return plan.tables[bucket / kNumShards]->flags().shard(bucket % kNumShards);
}

UpdateCounts* CountsOf(const BucketUpdate& update) {
  return &update.table->updates().shard(update.bucket % kNumShards)->counts;
}

// Sums the gradients of every key of the bucket, whose rows are all there, and applies the rule;
// with kWithAll not to rows that are masked, with the squared update lengths of watched rows and
// with transforms.
// summed: [2 * dim], overwritten. next: the bucket that this thread comes to after it.
template <bool kWithAll, class Rule>
SLIPSTREAM_ALWAYS_INLINE void UpdateRows(const BucketUpdate& update, const Rule& rule, int64_t next,
                                         int64_t dim, float* summed) {
  const LookupPlan& plan = *update.plan;
  const UpdatePolicy& policy = update.table->updates().policy();
  const RowTransforms transforms = update.table->options().rule.transforms;
  const bool masks = policy.mode == UpdatePolicy::Mode::kMask &&
                     update.table->UpdatesByPolicy(update.bucket % kNumShards);
  const bool transforms_any = transforms.any();
  const StepRates rates = update.rates;
  const int64_t row_floats = dim + rule.Slots(dim);
  ShardFlags* const flags = FlagsOfBucket(plan, update.bucket);
  const ShardFlags* const next_flags = FlagsOfBucket(plan, next);
  const CellRange keys = KeysOf(plan, update.bucket);
  int64_t use = keys.begin, masked = 0;
  const auto prefetch = [&](int64_t u, bool is_next) SLIPSTREAM_LAMBDA_INLINE {
    PrefetchRow(plan.unique_row[u], row_floats);
    if (kWithAll) {
      (is_next ? next_flags : flags)->Prefetch(plan.unique_index[u]);
    }
  };
  UpdateEach(keys, KeysOf(plan, next), prefetch, [&](int64_t u) SLIPSTREAM_LAMBDA_INLINE {
    const int64_t first_use = use;
    use = plan.uses_end[u];
    float* const row = plan.unique_row[u];
    const uint8_t row_flags = kWithAll ? flags->Of(plan.unique_index[u]) : 0;
    if (kWithAll && masks && (row_flags & kSaturated) != 0) {
      ++masked;
      if (!policy.is_shadow) {
        if (policy.decay_skipped) rule.DecaySlots(dim, row + dim);
        return;
      }
    }
    SumUses(plan, *update.gradients, first_use, use, dim, summed);
    const bool is_watched = kWithAll && (row_flags & kWatched) != 0;
    if (kWithAll && transforms_any) {
      float* const delta = summed + dim;
      if (is_watched) std::copy_n(row, dim, delta);
      transforms.BeforeRule(rates, dim, summed, row);
      rule.template Apply<false>(rates.rate, dim, summed, row);
      transforms.AfterRule(rates, dim, row);
      if (!is_watched) return;
      SetToStep(rates, dim, row, delta);
      flags->AddSquaredUpdateLength(plan.unique_index[u], SumOfSquares(dim, delta));
    } else if (is_watched) {
      rule.template Apply<true>(rates.rate, dim, summed, row);
      flags->AddSquaredUpdateLength(plan.unique_index[u], SumOfSquares(dim, summed));
    } else {
      rule.template Apply<false>(rates.rate, dim, summed, row);
    }
  });
  UpdateCounts* const counts = CountsOf(update);
  counts->offered += keys.end - keys.begin;
  counts->sent += keys.end - keys.begin - masked;
  counts->masked += masked;
}

template <bool kWithAll, class Rule>
SLIPSTREAM_ALWAYS_INLINE void UpdateRowsOfDim(const BucketUpdate& update, const Rule& rule,
                                              int64_t next, float* summed) {
  // With a dim that the compiler knows loops become a few instructions.
  switch (update.table->dim()) {
    case 16: {
      float sum[32];
      return UpdateRows<kWithAll>(update, rule, next, 16, sum);
    }
    case 32: {
      float sum[64];
      return UpdateRows<kWithAll>(update, rule, next, 32, sum);
    }
    case 64: {
      float sum[128];
      return UpdateRows<kWithAll>(update, rule, next, 64, sum);
    }
    default:
      return UpdateRows<kWithAll>(update, rule, next, update.table->dim(), summed);
  }
}

template <bool kWithAll>
SLIPSTREAM_ALWAYS_INLINE void UpdateRowsOfRule(const BucketUpdate& update, int64_t next,
                                               float* summed) {
  AllRules::Visit(update.table->options().rule, [&](const auto& rule) SLIPSTREAM_LAMBDA_INLINE {
    UpdateRowsOfDim<kWithAll>(update, rule, next, summed);
  });
}

SLIPSTREAM_SIMD_CLONES void UpdateAllRows(const BucketUpdate& update, int64_t next, float* summed) {
  UpdateRowsOfRule<false>(update, next, summed);
}

SLIPSTREAM_SIMD_CLONES void UpdateRowsWithAll(const BucketUpdate& update, int64_t next,
                                              float* summed) {
  UpdateRowsOfRule<true>(update, next, summed);
}

// The same where rows may have left the table since the lookup.
void UpdateStaleRows(const BucketUpdate& update, int64_t next, float* summed) {
  const LookupPlan& plan = *update.plan;
  const int64_t dim = update.table->dim();
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
    update.table->options().rule.Update(update.rates, dim, summed, found.row);
  });
}

// Updates the bucket's rows as the table's policy says. next: the bucket that this thread comes to
// after it.
void UpdateBucket(const BucketUpdate& update, int64_t next, const DeferredOfKeys& deferred,
                  PolicyScratch* scratch) {
  float* const summed = scratch->sum.data();
  const UpdatePolicy& policy = update.table->updates().policy();
  if (!update.table->UpdatesByPolicy(update.bucket % kNumShards)) {
    if (update.is_stale) return UpdateStaleRows(update, next, summed);
    if (update.table->options().rule.transforms.any()) {
      return UpdateRowsWithAll(update, next, summed);
    }
    UpdateAllRows(update, next, summed);
  } else if (policy.mode != UpdatePolicy::Mode::kDefer && policy.ranks == 1 && !update.is_stale) {
    UpdateRowsWithAll(update, next, summed);
  } else {
    UpdateBucketByPolicy(update, next, deferred, scratch);
  }
}

// The rows of the buckets' shards that the batch lacks, where they are updated, too.
void SweepBuckets(const LookupPlan& plan, CellRange buckets,
                  const std::vector<TableUpdate>& updates, SweepScratch* scratch) {
  for (int64_t b = buckets.begin; b < buckets.end; ++b) {
    const size_t t = static_cast<size_t>(b / kNumShards);
    if (!IsSwept(*plan.tables[t])) continue;
    ShardSweep sweep(plan.tables[t], b % kNumShards, scratch);
    const CellRange keys = KeysOf(plan, b);
    for (int64_t u = keys.begin; u < keys.end; ++u) sweep.LeaveOut(plan.unique_key[u]);
    sweep.UpdateOthers(updates[t].rates);
  }
}

}  // namespace

// On the bits, which compilers vectorise: a sum of floats has an order to keep.
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
    // Whatever needs memory comes first: rows are updated all or none.
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
