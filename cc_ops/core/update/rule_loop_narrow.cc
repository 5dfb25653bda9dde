// Separate from rule_loop.cc, so that both files compile in parallel.
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rule_loop.h"

namespace slipstream {
namespace {

// The slots of a rule are at most this factor times the dimension, and two more.
constexpr int64_t kMaxSlotsOfDim = 2, kMoreSlots = 2;

// summed: [dim]. row: [dim + slots]. Both are overwritten.
template <class Rule>
SLIPSTREAM_ALWAYS_INLINE void UpdateNarrow(const BucketUpdate& update, const Rule& rule,
                                           int64_t next, int64_t dim, float* summed, float* row) {
  const LookupPlan& plan = *update.plan;
  const StepRates rates = update.rates;
  const RowLayout layout = update.table->rows().layout();
  const int64_t slots = rule.Slots(dim), row_bytes = layout.bytes();
  const CellRange keys = KeysOf(plan, update.bucket);
  const float max_value = update.table->options().rule.RangeOf(layout.dtype).max_value;
  bool is_in_range = true;
  int64_t use = keys.begin, absent = 0;
  const auto prefetch = [&](int64_t u, bool /*is_next*/) SLIPSTREAM_LAMBDA_INLINE {
    PrefetchBytes(plan.unique_row[u], row_bytes);
  };
  UpdateEach(keys, KeysOf(plan, next), prefetch, [&](int64_t u) SLIPSTREAM_LAMBDA_INLINE {
    StoredRow* const stored = plan.unique_row[u];
    const int64_t first_use = use;
    use = plan.uses_end[u];
    if (stored == nullptr) {
      ++absent;
      return;
    }
    SumUses(plan, *update.gradients, first_use, use, dim, summed);
    layout.ReadInline(stored, dim, slots, row, row + dim);
    rule.Apply(rates.rate, dim, summed, row);
    is_in_range &= AreAtMost(max_value, dim, row) && rule.SlotsInRange(dim, row + dim);
    layout.WriteInline(row, dim, slots, plan.unique_key[u], rates.rounding, stored);
  });
  if (!is_in_range) update.shard()->is_in_range = false;
  UpdateCounts* const counts = CountsOf(update);
  counts->offered += keys.end - keys.begin - absent;
  counts->sent += keys.end - keys.begin - absent;
}

// One function per rule and dimension, as in rule_loop.cc.
template <class Rule, class Dim>
SLIPSTREAM_SIMD_CLONES void UpdateNarrowBy(Rule rule, Dim dim, const BucketUpdate& update,
                                           int64_t next, RowScratch* scratch) {
  LocalFloats<Dim, 1> summed(&scratch->sum);
  LocalFloats<Dim, 1 + kMaxSlotsOfDim, kMoreSlots> row(&scratch->copy);
  UpdateNarrow(update, rule, next, dim, summed.data(), row.data());
}

}  // namespace

void UpdateNarrowRows(const BucketUpdate& update, int64_t next, RowScratch* scratch) {
  ForRuleAndDim(*update.table, [&](const auto& rule, auto dim) {
    UpdateNarrowBy(rule, dim, update, next, scratch);
  });
}

}  // namespace slipstream
