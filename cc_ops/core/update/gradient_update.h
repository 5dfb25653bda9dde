// The update that belongs to a lookup: gradients of pooled vectors -> rows.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_GRADIENT_UPDATE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_GRADIENT_UPDATE_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/update/learning_rates.h"

namespace slipstream {

// Where the gradients of a feature's pooled vectors lie (see PooledOutput).
struct PooledGradient {
  const float* data = nullptr;
  int64_t stride = 0;
};

// InvalidArgument naming the first gradient, or the learning rate, that is not finite.
Status CheckFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                   const LearningRates& rates, const Parallel& parallel);

// Whether all values of a row are finite.
bool RowIsFinite(const float* row, int64_t dim);

// Sums the gradients of each distinct key in batch order and applies its table's
// update rule once. InvalidArgument on a gradient that is not finite: no row is
// changed then. A key evicted since the lookup is left out and counted in
// EmbeddingTable::num_dropped_updates. Takes the tables' mutexes.
Status ApplyGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                      const LearningRates& rates, const Parallel& parallel);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_GRADIENT_UPDATE_H_
