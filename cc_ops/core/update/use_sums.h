// Sums of the gradients that a batch has for one key.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_USE_SUMS_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_USE_SUMS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/update/gradient_update.h"

namespace slipstream {

// Rows, and uses, ahead of the one at work whose memory is asked for.
constexpr int64_t kUpdatePrefetch = 8;

SLIPSTREAM_ALWAYS_INLINE void PrefetchRow(const float* row, int64_t floats) {
  constexpr int64_t kCacheLine = 16;
  for (int64_t j = 0; j < floats; j += kCacheLine) __builtin_prefetch(row + j, 1);
}

// summed: [dim], overwritten by the sum over the plan's uses [begin, end), in order.
SLIPSTREAM_ALWAYS_INLINE void SumUses(const LookupPlan& plan,
                                      const std::vector<PooledGradient>& gradients, int64_t begin,
                                      int64_t end, int64_t dim, float* __restrict__ summed) {
  const int64_t num_places = static_cast<int64_t>(plan.uses.size());
  for (int64_t j = 0; j < dim; ++j) summed[j] = 0.f;
  for (int64_t use = begin; use < end; ++use) {
    if (use + kUpdatePrefetch < num_places) {
      const Occurrence& next = plan.uses[use + kUpdatePrefetch];
      const PooledGradient& gradient = gradients[next.feature];
      PrefetchRow(gradient.data + next.example * gradient.stride, dim);
    }
    const Occurrence& o = plan.uses[use];
    const float* __restrict__ g =
        gradients[o.feature].data + o.example * gradients[o.feature].stride;
    if (plan.scale.empty()) {
      for (int64_t j = 0; j < dim; ++j) summed[j] += g[j];
    } else {
      const float scale = plan.scale[plan.use_position[use]];
      for (int64_t j = 0; j < dim; ++j) summed[j] += scale * g[j];
    }
  }
}

// The same over the uses by examples of a range; all of them if it is the batch.
inline void SumUsesOf(CellRange examples, const LookupPlan& plan,
                      const std::vector<PooledGradient>& gradients, int64_t begin, int64_t end,
                      int64_t dim, float* __restrict__ summed) {
  if (examples.begin == 0 && examples.end == plan.batch) {
    return SumUses(plan, gradients, begin, end, dim, summed);
  }
  std::fill_n(summed, dim, 0.f);
  for (int64_t use = begin; use < end; ++use) {
    const Occurrence& o = plan.uses[use];
    if (o.example < examples.begin || o.example >= examples.end) continue;
    const float scale = plan.scale.empty() ? 1.f : plan.scale[plan.use_position[use]];
    const float* g = gradients[o.feature].data + o.example * gradients[o.feature].stride;
    for (int64_t j = 0; j < dim; ++j) summed[j] += scale * g[j];
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_USE_SUMS_H_
