// Settings and counters for the gradients of a table: apply, mask or defer them.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_UPDATE_POLICY_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_UPDATE_POLICY_H_

#include <cstdint>

#include "cc_ops/core/base/status.h"

namespace slipstream {

struct UpdatePolicy {
  enum class Mode { kApply, kMask, kDefer };
  enum class Trigger {
    kMovement,  // Defer any row's gradient until applying it would move a value by `movement`.
    kInterval,  // Defer the gradients of saturated rows.
  };
  Mode mode = Mode::kApply;
  bool decay_skipped = false;  // kMask: whether the moments of a masked row decay.
  Trigger trigger = Trigger::kMovement;
  float movement = 0.f;  // In units of the values.
  int64_t max_age = 1;   // Age in updates of the table at which a deferred gradient is due.
  // Maximum number of deferred gradients, divided evenly among the shards and ranks.
  int64_t max_rows = 0;
  // Number of simulated ranks. Each has a part of every batch and its own deferred gradients.
  // Gradients that are due on multiple ranks in one update are applied as one gradient.
  int ranks = 1;
  // Apply all gradients immediately and count the decisions of the policy for a sample of the keys.
  bool is_shadow = false;
  // Gradients are exchanged between processes: they leave only through CollectGradients and
  // CollectAllDeferred (exchange/push.h). The table does not apply them, and they stay when their
  // row is evicted.
  bool is_exchanged = false;

  // Returns whether updates do anything else than applying each gradient at once.
  bool IsActive() const { return mode != Mode::kApply || ranks > 1; }
  // Returns whether the policy applies to the keys of a shard; true for all shards, but for 1 in 16
  // with a shadow policy.
  bool Samples(int64_t shard) const { return !is_shadow || shard % kShadowSampling == 0; }
  static constexpr int kShadowSampling = 16;
};

// Returns InvalidArgument with the setting, its value and the allowed values.
Status ValidateUpdatePolicy(const UpdatePolicy& policy);

// Counters of gradient rows, one row per key, update and rank. In shadow mode they count what the
// policy would have done.
struct UpdateCounts {
  int64_t offered = 0;          // Gradient rows of the updates.
  int64_t sent = 0;             // Applied or collected; includes deferred gradients.
  int64_t masked = 0;           // Dropped.
  int64_t deferred = 0;         // Added to a deferred gradient that stayed.
  int64_t due_by_movement = 0;  // Part of `sent`.
  int64_t due_by_age = 0;       // Part of `sent`.
  int64_t flushed = 0;          // Part of `sent`, before an evaluation or export.
  int64_t over_budget = 0;      // Part of `sent`: not deferred because the budget was used up.
  int64_t evicted = 0;          // Deferred gradients dropped: their row was removed or overwritten.
  int64_t without_gradient = 0;  // Part of `sent`, in an update without a gradient of their key.

  // Adds `factor` times each counter of `other`.
  void Add(const UpdateCounts& other, int64_t factor = 1);
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_UPDATE_POLICY_H_
