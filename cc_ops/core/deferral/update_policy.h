// What becomes of a row's gradient: applied, masked, or deferred and applied later.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_UPDATE_POLICY_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_UPDATE_POLICY_H_

#include <cstdint>

#include "cc_ops/core/base/status.h"

namespace slipstream {

struct UpdatePolicy {
  enum class Mode { kApply, kMask, kDefer };
  enum class Trigger {
    kMovement,  // any row's gradient waits until applying it would move a value by `movement`
    kInterval,  // saturated rows' gradients wait
  };
  Mode mode = Mode::kApply;
  bool decay_skipped = false;  // kMask: whether the moments of a masked row decay
  Trigger trigger = Trigger::kMovement;
  float movement = 0.f;  // in the unit of the rows
  int64_t max_age = 1;   // none is deferred longer, in updates of the table
  int64_t max_rows = 0;  // gradients deferred at most
  // Simulated ranks: each has its share of every batch and its own deferred gradients. The rows
  // that become due on several of them at once are applied as one gradient.
  int ranks = 1;
  // Everything is applied at once, and what the policy would have done is counted
  // for a sample of the keys.
  bool is_shadow = false;
  // Deferred gradients leave by CollectGradients and CollectAllDeferred only (exchange/push.h), to
  // be exchanged between processes: nothing of this table applies them, and they stay when their
  // row leaves.
  bool is_exchanged = false;

  // Whether anything is to be done, or counted, beside applying gradients.
  bool IsActive() const { return mode != Mode::kApply || ranks > 1; }
  // Whether that is done for a shard's keys; a shadow policy takes one shard in 16.
  bool Samples(int64_t shard) const { return !is_shadow || shard % kShadowSampling == 0; }
  static constexpr int kShadowSampling = 16;
};

// InvalidArgument naming the setting, its value and what is allowed.
Status ValidateUpdatePolicy(const UpdatePolicy& policy);

// What became of gradient rows: one row per key, update and rank. In shadow mode: what the policy
// would have done.
struct UpdateCounts {
  int64_t offered = 0;           // came in
  int64_t sent = 0;              // applied, deferred ones included (ranks: exchanged)
  int64_t masked = 0;            // thrown away
  int64_t deferred = 0;          // added to a deferred gradient that stayed
  int64_t due_by_movement = 0;   // of `sent`
  int64_t due_by_age = 0;        // of `sent`
  int64_t flushed = 0;           // of `sent`: before an evaluation or export
  int64_t over_budget = 0;       // of `sent`: the budget had no room to defer them
  int64_t evicted = 0;           // deferred gradients whose row left the table
  int64_t without_gradient = 0;  // of `sent`: in an update without a gradient of their key

  void Add(const UpdateCounts& other, int64_t factor = 1);
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_UPDATE_POLICY_H_
