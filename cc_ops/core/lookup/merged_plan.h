// Merges the plans of multiple lookups, so that one update serves all lookups.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_MERGED_PLAN_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_MERGED_PLAN_H_

#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/lookup/lookup_plan.h"

namespace slipstream {

// Sets `merged` to a plan with the features of all plans, in order. The uses of a key are ordered
// by plan, then as in its plan. plans: at least one, of training lookups.
//
// Returns InvalidArgument if the plans have different tables, and ResourceExhausted if memory runs
// out.
Status MergePlans(const std::vector<const LookupPlan*>& plans, const Parallel& parallel,
                  LookupPlan* merged);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_MERGED_PLAN_H_
