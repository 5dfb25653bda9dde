// Applies the gradients of pooled vectors to the rows of a lookup.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_GRADIENT_UPDATE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_GRADIENT_UPDATE_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/update/learning_rates.h"

namespace slipstream {

// The gradients of the pooled vectors of a feature: the gradient of example i starts at data + i *
// stride.
struct PooledGradient {
  const float* data = nullptr;
  int64_t stride = 0;
};

// Returns InvalidArgument, with its place, for the first gradient that is not finite, and for a
// learning rate that is not finite or does not match the number of tables. Otherwise sets `largest`
// to the largest magnitude of a gradient. gradients: one per feature of the plan.
Status CheckFinite(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                   const LearningRates& rates, const Parallel& parallel, float* largest);

// Returns the largest magnitude of `values` ([n]); a NaN or infinity if there is one.
float LargestMagnitude(const float* values, int64_t n);

// Returns whether all values of a row are finite.
bool RowIsFinite(const float* row, int64_t dim);

// Sums the gradients of each distinct key in batch order and applies the update rule of its table
// once, unless the update policy of the table masks or defers the sum. gradients: one per feature
// of the plan. Returns InvalidArgument for an invalid learning rate, and if a gradient, a sum, an
// updated row or a slot is not finite (checked_update.h); no row is changed then. A key that was
// evicted after the lookup is skipped and counted in UpdateState::num_dropped. Takes the mutexes of
// the tables.
Status ApplyGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                      const LearningRates& rates, const Parallel& parallel);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_GRADIENT_UPDATE_H_
