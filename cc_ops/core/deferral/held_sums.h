// Gradient sums of a variable's rows that are held back until they are due: what a step's gradients
// become, and which sums leave. See slipstream_tf/stores/held_sums.py for the store around it.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_HELD_SUMS_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_HELD_SUMS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/key_set.h"

namespace slipstream {

// The buffers of held sums: a view, nothing is owned. Place p holds the sum of keys[p].
struct HeldSums {
  // The key of a place without a sum. The gradient of a row that has this key leaves at once.
  static constexpr int64_t kFree = std::numeric_limits<int64_t>::min();

  int64_t* keys;     // [capacity], each but kFree once
  int64_t* since;    // [capacity], the step in which the sum began
  float* sums;       // [capacity, dim], row-major
  int64_t capacity;  // places
  int64_t dim;       // values per row
};

// What a step does.
struct HoldRule {
  int64_t step;      // its number, ascending from step to step
  int64_t max_age;   // steps from which on a sum leaves
  int64_t max_rows;  // sums held at most
  bool defers;       // false: nothing more is held; sums leave when their key or age comes
  bool lets_go;      // all sums leave, and nothing is held
  // What becomes of a gradient without a reason to leave is decided by `may_wait` (a movement
  // below the threshold) and counted as such; else by whether the row is marked.
  bool by_movement;

  SLIPSTREAM_HOST_DEVICE bool MayHold() const { return defers && !lets_go; }
  SLIPSTREAM_HOST_DEVICE bool IsOld(int64_t since) const { return step - since >= max_age; }
};

// What became of a step's rows; see HeldCounts in slipstream_tf/ops/held_sums.py.
struct HeldCounts {
  int64_t held;             // were added to a sum that stayed
  int64_t due_by_movement;  // left because of their sum
  int64_t due_by_age;       // sums that left because of their age
  int64_t flushed;          // sums that left because all were let go
  int64_t refused;          // found no room
  int64_t left_alone;       // sums that left in a step without a gradient for their key
  int64_t leaving;          // rows that leave: of the outputs
  int64_t pending;          // sums that are held after the step
};

// Where a gradient goes.
enum class RowFate : uint8_t {
  kPasses,    // leaves, with the sum that was held
  kStays,     // joins the sum that is held
  kWantsRoom  // begins a sum if there is room, else leaves
};

// Decides about one row.
//   is_held, since: whether and since when a sum is held for its key, before this step.
//   is_sound: whether all values of the sum are finite; others are the optimizer's matter at once.
//   may_wait: whether the sum is small enough, or the row marked.
SLIPSTREAM_HOST_DEVICE inline RowFate FateOf(const HoldRule& rule, bool is_held, int64_t since,
                                             bool is_sound, bool may_wait) {
  const bool is_old = is_held && rule.IsOld(since);
  const bool waits = may_wait && is_sound && !is_old && rule.MayHold();
  if (!waits) return RowFate::kPasses;
  return is_held ? RowFate::kStays : RowFate::kWantsRoom;
}

// First half of a step: what the sums would be.
//   keys      [n], each once.
//   gradients [n, dim].
//   places    [n]: where a key's sum is held, or -1.
//   sums      [n, dim]: gradient and held sum, added.
// InvalidArgument if a key is given twice.
Status AddToHeld(const HeldSums& held, const int64_t* keys, const float* gradients, int64_t n,
                 int64_t* places, float* sums);

// What leaves in a step: keys ascending, each once.
struct LeavingRows {
  std::vector<int64_t> keys;
  std::vector<float> sums;  // [keys, dim]
};

// What a step will do, found before anything is changed.
struct DuePlan {
  std::vector<RowFate> fates;     // [n]
  std::vector<uint8_t> is_freed;  // [capacity]
  std::vector<int64_t> targets;   // [n], the place that a row's sum is kept in, or -1
};

// Second half: keeps the sums that may wait and takes out those that are due.
//   places, sums  as AddToHeld wrote them, for the same keys.
//   may_wait      [n], read if rule.by_movement.
//   marked        the rows that may wait, read otherwise.
// Places are given to new sums in their order, for keys in their order. InvalidArgument if a key's
// sum is not where `places` says. Changes nothing: KeepOthers does, which needs no memory.
Status FindDue(const HeldSums& held, const HoldRule& rule, const int64_t* keys, int64_t n,
               const int64_t* places, const float* sums, const bool* may_wait,
               const KeySetView& marked, DuePlan* plan, LeavingRows* leaving, HeldCounts* counts);
void KeepOthers(const HeldSums& held, const HoldRule& rule, const int64_t* keys, int64_t n,
                const float* sums, const DuePlan& plan);

// Sums that are held.
int64_t CountHeld(const HeldSums& held);

// Copies what is held to the first places of other buffers and frees the rest. InvalidArgument,
// changing nothing, if they have no room for it.
Status CopyHeld(const HeldSums& held, const HeldSums& to);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_HELD_SUMS_H_
