// Decides whether a gradient is applied, deferred or due.
//
// The same functions decide for tables, variables and SOK variables, on the CPU and on a GPU. A
// gradient that may wait begins to be deferred, or is added to the deferred gradient of its key,
// which is due when it may no longer wait, expires, or is flushed.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRAL_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRAL_H_

#include <cstdint>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/deferral/update_policy.h"

namespace slipstream {

// Inputs of all decisions in a step.
struct DeferralRule {
  int64_t step = 0;      // Number of the step, increasing.
  int64_t max_age = 1;   // Age in steps at which a deferred gradient is due.
  int64_t max_rows = 0;  // Maximum number of deferred gradients.
  // If false, no more gradients are deferred. Deferred ones leave with the next gradient of their
  // key, or by age.
  bool defers = false;
  bool flushes = false;     // Whether all deferred gradients are due and no more are deferred.
  bool by_movement = true;  // Whether a gradient that may not wait counts as due by movement.

  SLIPSTREAM_HOST_DEVICE bool MayDefer() const { return defers && !flushes; }
  SLIPSTREAM_HOST_DEVICE bool IsExpired(int64_t since) const { return step - since >= max_age; }
  // deferred: number of deferred gradients without the new one.
  SLIPSTREAM_HOST_DEVICE bool HasBudget(int64_t deferred) const { return deferred < max_rows; }
};

// Result for a gradient of this step, or for a deferred gradient.
enum class Decision : uint8_t {
  kApply,  // Leaves with the deferred gradient of its key, as do all up to kOverBudget.
  kDueByMovement,
  kDueByAge,
  kFlush,
  kOverBudget,  // Would be deferred, but the budget is used up.
  kBegin,       // Begins to be deferred; becomes kOverBudget if the budget is used up.
  kStay,        // Is added to the deferred gradient, which stays.
};

SLIPSTREAM_HOST_DEVICE inline bool IsDue(Decision decision) {
  return decision <= Decision::kOverBudget;
}

// Decides about the gradient of a key.
//   is_deferred, since: whether the key has a deferred gradient, and the step in which it began.
//   may_wait: whether the sum of both is small enough, or the row is saturated.
SLIPSTREAM_HOST_DEVICE inline Decision Decide(const DeferralRule& rule, bool is_deferred,
                                              int64_t since, bool may_wait) {
  if (is_deferred && rule.IsExpired(since)) return Decision::kDueByAge;
  if (!rule.MayDefer()) return Decision::kApply;
  if (!may_wait) return rule.by_movement ? Decision::kDueByMovement : Decision::kApply;
  return is_deferred ? Decision::kStay : Decision::kBegin;
}

// Decides about the deferred gradient of a key that has no gradient in this step.
SLIPSTREAM_HOST_DEVICE inline Decision DecideWithoutGradient(const DeferralRule& rule,
                                                             int64_t since) {
  if (rule.flushes) return Decision::kFlush;
  return rule.IsExpired(since) ? Decision::kDueByAge : Decision::kStay;
}

// Returns the counter of a decision in addition to `sent`, or null.
SLIPSTREAM_HOST_DEVICE inline int64_t* CounterOf(Decision decision, UpdateCounts* counts) {
  switch (decision) {
    case Decision::kApply:
      return nullptr;
    case Decision::kDueByMovement:
      return &counts->due_by_movement;
    case Decision::kDueByAge:
      return &counts->due_by_age;
    case Decision::kFlush:
      return &counts->flushed;
    case Decision::kOverBudget:
      return &counts->over_budget;
    case Decision::kBegin:
    case Decision::kStay:
      return &counts->deferred;
  }
  return nullptr;
}

// Counts a decision about a gradient of this step, or about a deferred gradient.
inline void Count(Decision decision, bool has_gradient, UpdateCounts* counts) {
  if (int64_t* counter = CounterOf(decision, counts)) ++*counter;
  counts->sent += IsDue(decision);
  counts->without_gradient += !has_gradient;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRAL_H_
