#include "cc_ops/core/gradient_update.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "cc_ops/core/key_sort.h"
#include "cc_ops/core/simd_clones.h"
#include "cc_ops/core/table_locks.h"

namespace slipstream {
namespace {

constexpr int64_t kPrefetchDistance = 8;

void PrefetchRow(const float* row, int64_t floats) {
  constexpr int64_t kCacheLine = 16;
  for (int64_t j = 0; j < floats; j += kCacheLine) __builtin_prefetch(row + j, 1);
}

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

}  // namespace

Status ApplyGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                      float learning_rate, const Parallel& parallel) {
  if (!(learning_rate - learning_rate == 0.f)) {
    return InvalidArgument("learning_rate is " + std::to_string(learning_rate) +
                           "; allowed: a finite number");
  }
  if (!AllFinite(plan, gradients, parallel)) {
    const Status status = DescribeNonFinite(plan, gradients);
    if (!status.ok()) return status;
  }
  const ExclusiveTableLocks locks(plan.tables);
  std::vector<float> rates;
  std::vector<bool> is_stale;
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    EmbeddingTable* table = plan.tables[t];
    rates.push_back(table->options().rule.EffectiveRate(learning_rate, table->NextUpdateStep()));
    is_stale.push_back(table->generation() != plan.generations[t]);
  }
  const std::vector<int64_t> bounds = BalancedBuckets(plan.unique_begin, parallel.threads);
  std::vector<std::atomic<int64_t>> dropped(plan.tables.size());
  for (auto& count : dropped) count = 0;
  int64_t widest = 0;
  for (const EmbeddingTable* table : plan.tables) widest = std::max(widest, table->dim());
  const int64_t num_places = static_cast<int64_t>(plan.uses.size());
  const std::vector<float> scratch_model(static_cast<size_t>(widest));
  parallel.run(parallel.threads, [&](int task) {
    std::vector<float> summed = scratch_model;
    for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
      const size_t t = static_cast<size_t>(b / kNumShards);
      const EmbeddingTable& table = *plan.tables[t];
      const UpdateRule rule = table.options().rule;
      const int64_t dim = table.dim();
      const int64_t row_floats = dim + table.slots_per_row();
      const int64_t begin = plan.unique_begin[b], end = begin + plan.unique_count[b];
      int64_t use = begin;
      for (int64_t u = begin; u < end; ++u) {
        // Places between buckets hold stale or no rows: prefetching those is harmless.
        const int64_t ahead = u + kPrefetchDistance;
        if (ahead < num_places) PrefetchRow(plan.unique_row[ahead], row_floats);
        const int64_t uses_end = plan.uses_end[u];
        std::fill_n(summed.data(), dim, 0.f);
        for (; use < uses_end; ++use) {
          if (use + kPrefetchDistance < num_places) {
            const Occurrence& next = plan.uses[use + kPrefetchDistance];
            PrefetchRow(
                gradients[next.feature].data + next.example * gradients[next.feature].stride, dim);
          }
          const Occurrence& o = plan.uses[use];
          const float* __restrict__ g =
              gradients[o.feature].data + o.example * gradients[o.feature].stride;
          float* __restrict__ sum = summed.data();
          if (plan.scale.empty()) {
            for (int64_t j = 0; j < dim; ++j) sum[j] += g[j];
          } else {
            const float scale = plan.scale[o.position];
            for (int64_t j = 0; j < dim; ++j) sum[j] += scale * g[j];
          }
        }
        float* row = plan.unique_row[u];
        if (is_stale[t]) {
          row = table.Find(plan.unique_key[u], HashKey(plan.unique_key[u]));
          if (row == nullptr) {
            ++dropped[t];
            continue;
          }
        }
        rule.Apply(rates[t], dim, summed.data(), row);
      }
    }
  });
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    plan.tables[t]->CountDroppedUpdates(dropped[t]);
  }
  return OkStatus();
}

}  // namespace slipstream
