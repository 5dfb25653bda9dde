#include "cc_ops/core/gradient_update.h"

#include <atomic>
#include <cstring>
#include <string>

#include "cc_ops/core/key_sort.h"
#include "cc_ops/core/policy_update.h"
#include "cc_ops/core/simd_clones.h"
#include "cc_ops/core/table_locks.h"
#include "cc_ops/core/use_sums.h"

namespace slipstream {
namespace {

// Names the first gradient that is not finite.
Status DescribeNonFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients) {
  for (size_t f = 0; f < gradients.size(); ++f) {
    const EmbeddingTable& table = *plan.tables[plan.feature_table[f]];
    for (int64_t i = 0; i < plan.batch; ++i) {
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

bool AllFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
               const Parallel& parallel) {
  std::atomic<bool> all_finite{true};
  parallel.run(parallel.threads, [&](int task) {
    const CellRange range = CellsOf(task, parallel.threads, plan.batch);
    bool is_finite = true;
    for (size_t f = 0; f < gradients.size(); ++f) {
      const int64_t dim = plan.tables[plan.feature_table[f]]->dim();
      for (int64_t i = range.begin; i < range.end; ++i) {
        is_finite &= RowIsFinite(gradients[f].data + i * gradients[f].stride, dim);
      }
    }
    if (!is_finite) all_finite = false;
  });
  return all_finite;
}

// Applies the rule to every row of the bucket.
void UpdateBucket(const BucketUpdate& update, float* summed) {
  const LookupPlan& plan = *update.plan;
  EmbeddingTable* table = update.table;
  const UpdateRule rule = table->options().rule;
  const int64_t dim = table->dim();
  const int64_t row_floats = dim + table->slots_per_row();
  const int64_t begin = plan.unique_begin[update.bucket];
  const int64_t end = begin + plan.unique_count[update.bucket];
  const int64_t num_places = static_cast<int64_t>(plan.uses.size());
  TableShard* shard = table->shard(update.bucket % kNumShards);
  shard->counts.offered += end - begin;
  shard->counts.sent += end - begin;
  int64_t use = begin;
  for (int64_t u = begin; u < end; ++u) {
    // Places between buckets hold stale or no rows: prefetching those is harmless.
    const int64_t ahead = u + kUpdatePrefetch;
    if (ahead < num_places) PrefetchRow(plan.unique_row[ahead], row_floats);
    SumUses(plan, *update.gradients, use, plan.uses_end[u], dim, summed);
    use = plan.uses_end[u];
    float* row = plan.unique_row[u];
    if (update.is_stale) {
      row = table->Find(plan.unique_key[u], HashKey(plan.unique_key[u]));
      if (row == nullptr) {
        ++*update.dropped;
        continue;
      }
    }
    rule.Apply(update.rate, dim, summed, row);
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
                   float learning_rate, const Parallel& parallel) {
  if (!(learning_rate - learning_rate == 0.f)) {
    return InvalidArgument("learning_rate is " + std::to_string(learning_rate) +
                           "; allowed: a finite number");
  }
  return AllFinite(plan, gradients, parallel) ? OkStatus() : DescribeNonFinite(plan, gradients);
}

Status ApplyGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                      float learning_rate, const Parallel& parallel) {
  const Status status = CheckFinite(plan, gradients, learning_rate, parallel);
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(plan.tables);
  std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch(plan.tables));
  std::vector<float> rates;
  std::vector<bool> is_stale;
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    EmbeddingTable* table = plan.tables[t];
    rates.push_back(table->options().rule.EffectiveRate(learning_rate, table->NextUpdateStep()));
    table->set_last_learning_rate(learning_rate);
    is_stale.push_back(table->generation() != plan.generations[t]);
  }
  const std::vector<int64_t> bounds = BalancedBuckets(plan.unique_begin, parallel.threads);
  std::vector<std::atomic<int64_t>> dropped(plan.tables.size());
  for (auto& count : dropped) count = 0;
  parallel.run(parallel.threads, [&](int task) {
    PolicyScratch& scratch = scratches[task];
    for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
      const size_t t = static_cast<size_t>(b / kNumShards);
      int64_t dropped_here = 0;
      const BucketUpdate update = {&plan,    &gradients,  plan.tables[t], b,
                                   rates[t], is_stale[t], &dropped_here};
      if (plan.tables[t]->UpdatesByPolicy(b % kNumShards)) {
        UpdateBucketByPolicy(update, &scratch);
      } else {
        UpdateBucket(update, scratch.sum.data());
      }
      if (dropped_here > 0) dropped[t] += dropped_here;
    }
  });
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    plan.tables[t]->CountDroppedUpdates(dropped[t]);
  }
  return OkStatus();
}

}  // namespace slipstream
