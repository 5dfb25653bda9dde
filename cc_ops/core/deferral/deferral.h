// Decides whether a gradient is applied at once or deferred, and when a deferred gradient is due.
//
// The same functions decide for tables, for TensorFlow variables and for variables of
// SparseOperationKit (SOK), on the CPU and on a GPU. A gradient that may wait becomes the deferred
// gradient of its key, or is added to it. The deferred gradient is due, which means that it must be
// applied or sent, when it may no longer wait, when it reaches the maximum age, and in a flush.
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
  int64_t max_rows = 0;  // Maximum number of deferred gradients (the budget).
  // If false, no more gradients are deferred. A deferred gradient is due at the next gradient of
  // its key, or by age.
  bool defers = false;
  bool flushes = false;     // Whether all deferred gradients are due and no more are deferred.
  bool by_movement = true;  // Whether a gradient that may not wait counts as due by movement.

  SLIPSTREAM_HOST_DEVICE bool MayDefer() const { return defers && !flushes; }
  // Returns whether a gradient that was first deferred in step `since` has the maximum age.
  SLIPSTREAM_HOST_DEVICE bool IsExpired(int64_t since) const { return step - since >= max_age; }
  // Returns whether it has the maximum age in the next step.
  SLIPSTREAM_HOST_DEVICE bool ExpiresNext(int64_t since) const {
    return step + 1 - since >= max_age;
  }
  // Returns whether another gradient may be deferred. deferred: number of gradients deferred now.
  SLIPSTREAM_HOST_DEVICE bool HasBudget(int64_t deferred) const { return deferred < max_rows; }
};

// Result for the sum of the gradient of a key in this step and its deferred gradient, or for one of
// them if the other is absent. The sum is applied or sent now, or it is deferred (kBegin, kStay).
// IsDue relies on the order of the values.
enum class Decision : uint8_t {
  kApply,          // No gradients are deferred now (MayDefer), or the row is not saturated.
  kDueByMovement,  // The sum would move the row too far.
  kDueByAge,
  kFlush,       // A flush; only for a key without a gradient in this step.
  kOverBudget,  // Would begin to be deferred, but the budget is used up.
  kBegin,       // Begins to be deferred; if no budget is left, the caller uses kOverBudget instead.
  kStay,        // Stays deferred; replaces the deferred gradient of its key.
};

// Returns whether the sum is applied or sent now. It is also true for kApply.
SLIPSTREAM_HOST_DEVICE inline bool IsDue(Decision decision) {
  return decision <= Decision::kOverBudget;
}

// Decides about the gradient of a key.
//   is_deferred, since: whether the key has a deferred gradient, and the step in which it began.
//   may_wait: whether the movement by the sum of both is small enough or, with by_movement = false,
//     whether the row is saturated.
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

// Returns the member of `counts` that counts a decision, or null for kApply. It does not return
// `sent`, which counts all due decisions.
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

// Adds a decision to `counts`. has_gradient: whether it is about a gradient of this step; false for
// a deferred gradient of a key without a gradient in this step.
inline void Count(Decision decision, bool has_gradient, UpdateCounts* counts) {
  if (int64_t* counter = CounterOf(decision, counts)) ++*counter;
  counts->sent += IsDue(decision);
  counts->without_gradient += !has_gradient;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRAL_H_
