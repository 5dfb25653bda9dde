#include "cc_ops/core/update/rule_loop.h"

#include <algorithm>

#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {
namespace {

const ShardFlags* FlagsOfBucket(const LookupPlan& plan, int64_t bucket) {
  return plan.tables[bucket / kNumShards]->flags().shard(bucket % kNumShards);
}

// Returns whether all rows of a bucket are in range (ValueRange). The update, which ended just
// before, has left the rows in the cache. Not part of its loop, which compilers would vectorize
// worse.
template <class Rule>
SLIPSTREAM_SIMD_CLONES bool RowsAreInRange(const BucketUpdate& update, Rule rule, int64_t dim) {
  const float max_value = update.table->options().rule.RangeOf(RowDtype::kFloat32).max_value;
  const CellRange keys = KeysOf(*update.plan, update.bucket);
  bool are_in_range = true;
  for (int64_t u = keys.begin; u < keys.end; ++u) {
    if (update.plan->unique_row[u] == nullptr) continue;
    const float* const row = RowLayout::Floats(update.plan->unique_row[u]);
    are_in_range &= AreAtMost(max_value, dim, row) && rule.SlotsInRange(dim, row + dim);
  }
  return are_in_range;
}

// Updates all rows of a bucket. summed: [dim], overwritten.
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
  const int64_t row_bytes = (dim + rule.Slots(dim)) * kFloatBytes;
  const ShardFlags* const flags = FlagsOfBucket(plan, update.bucket);
  const ShardFlags* const next_flags = FlagsOfBucket(plan, next);
  const CellRange keys = KeysOf(plan, update.bucket);
  int64_t use = keys.begin, masked = 0, absent = 0;
  const auto prefetch = [&](int64_t u, bool is_next) SLIPSTREAM_LAMBDA_INLINE {
    PrefetchBytes(plan.unique_row[u], row_bytes);
    if (kWithAll) {
      (is_next ? next_flags : flags)->Prefetch(plan.unique_index[u]);
    }
  };
  UpdateEach(keys, KeysOf(plan, next), prefetch, [&](int64_t u) SLIPSTREAM_LAMBDA_INLINE {
    const int64_t first_use = use;
    use = plan.uses_end[u];
    if (plan.unique_row[u] == nullptr) {
      ++absent;
      return;
    }
    float* const row = RowLayout::Floats(plan.unique_row[u]);
    if (kWithAll && masks && (flags->Of(plan.unique_index[u]) & kSaturated) != 0) {
      ++masked;
      if (!policy.is_shadow) {
        if (policy.decay_skipped) rule.DecaySlots(dim, row + dim);
        return;
      }
    }
    SumUses(plan, *update.gradients, first_use, use, dim, summed);
    if (kWithAll && transforms_any) transforms.BeforeRule(rates, dim, summed, row);
    rule.Apply(rates.rate, dim, summed, row);
    if (kWithAll && transforms_any) transforms.AfterRule(rates, dim, row);
  });
  // Other rows stay in range; see UpdateRule::Fits.
  const bool checks = !Rule::kStaysInRange || (kWithAll && !transforms.OnlyShrink());
  if (checks && !RowsAreInRange(update, rule, dim)) update.shard()->is_in_range = false;
  UpdateCounts* const counts = CountsOf(update);
  counts->offered += keys.end - keys.begin - absent;
  counts->sent += keys.end - keys.begin - absent - masked;
  counts->masked += masked;
}

// One function per rule and dimension, because compile time grows faster than linearly with the
// length of a function. The rule is passed by value, so that the compiler knows that no row aliases
// it.
template <bool kWithAll, class Rule, class Dim>
SLIPSTREAM_SIMD_CLONES void UpdateRowsBy(Rule rule, Dim dim, const BucketUpdate& update,
                                         int64_t next, RowScratch* scratch) {
  LocalFloats<Dim, 1> summed(&scratch->sum);
  UpdateRows<kWithAll>(update, rule, next, dim, summed.data());
}

template <bool kWithAll>
void UpdateRowsOfTable(const BucketUpdate& update, int64_t next, RowScratch* scratch) {
  ForRuleAndDim(*update.table, [&](const auto& rule, auto dim) {
    UpdateRowsBy<kWithAll>(rule, dim, update, next, scratch);
  });
}

}  // namespace

void UpdatePlainRows(const BucketUpdate& update, int64_t next, RowScratch* scratch) {
  UpdateRowsOfTable<false>(update, next, scratch);
}

void UpdateRowsWithAll(const BucketUpdate& update, int64_t next, RowScratch* scratch) {
  UpdateRowsOfTable<true>(update, next, scratch);
}

}  // namespace slipstream
