// The decision about a gradient that may be deferred: of a table, of a variable and of SOK, on the
// CPU and on a GPU.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRAL_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRAL_H_

#include <cstdint>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/deferral/update_policy.h"

namespace slipstream {

// What the decisions of a step go by.
struct DeferralRule {
  int64_t step = 0;         // its number, ascending from step to step
  int64_t max_age = 1;      // steps from which on a deferred gradient is due
  int64_t max_rows = 0;     // gradients deferred at most
  bool defers = false;      // false: nothing more is deferred; what is leaves with its key or age
  bool flushes = false;     // all that is deferred is due, and nothing more is deferred
  bool by_movement = true;  // gradients that may not wait are due by movement, and counted so

  SLIPSTREAM_HOST_DEVICE bool MayDefer() const { return defers && !flushes; }
  SLIPSTREAM_HOST_DEVICE bool IsExpired(int64_t since) const { return step - since >= max_age; }
  // deferred: how many are, besides the one that is to be.
  SLIPSTREAM_HOST_DEVICE bool HasBudget(int64_t deferred) const { return deferred < max_rows; }
};

// What becomes of a gradient, or of one that is deferred.
enum class Decision : uint8_t {
  kApply,  // leaves, with what is deferred of its key; so do all up to kOverBudget
  kDueByMovement,
  kDueByAge,
  kFlush,
  kOverBudget,  // would begin to be deferred, but the budget has no room
  kBegin,       // begins to be deferred if the budget has room, else becomes kOverBudget
  kStay,        // is added to what is deferred, which stays
};

SLIPSTREAM_HOST_DEVICE inline bool IsDue(Decision decision) {
  return decision <= Decision::kOverBudget;
}

// Decides about the gradient of a key.
//   is_deferred, since: whether and since which step one of its key is deferred.
//   may_wait: whether the sum of both is small enough, or its row saturated.
SLIPSTREAM_HOST_DEVICE inline Decision Decide(const DeferralRule& rule, bool is_deferred,
                                              int64_t since, bool may_wait) {
  if (is_deferred && rule.IsExpired(since)) return Decision::kDueByAge;
  if (!rule.MayDefer()) return Decision::kApply;
  if (!may_wait) return rule.by_movement ? Decision::kDueByMovement : Decision::kApply;
  return is_deferred ? Decision::kStay : Decision::kBegin;
}

// Decides about what is deferred of a key that has no gradient in this step.
SLIPSTREAM_HOST_DEVICE inline Decision DecideWithoutGradient(const DeferralRule& rule,
                                                             int64_t since) {
  if (rule.flushes) return Decision::kFlush;
  return rule.IsExpired(since) ? Decision::kDueByAge : Decision::kStay;
}

// The counter of a decision beside `sent`, or null.
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

// Counts what a decision does to a gradient of this step, or to one that is deferred.
inline void Count(Decision decision, bool has_gradient, UpdateCounts* counts) {
  if (int64_t* counter = CounterOf(decision, counts)) ++*counter;
  counts->sent += IsDue(decision);
  counts->without_gradient += !has_gradient;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRAL_H_
