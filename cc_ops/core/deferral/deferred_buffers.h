// Deferred gradients of a variable's rows in flat buffers, for variables of TensorFlow and of
// SparseOperationKit (SOK).
//
// A step has two halves, between which the caller decides which sums may wait:
//
//   AddDeferred           gradients + deferred gradients -> sums
//   FindDue, KeepOthers   return the sums that are due, and store the others in the buffers
//
// The buffers are tensors that the caller owns, so that a checkpoint can save them. The same steps
// run on a GPU (deferred_buffers.cu.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/deferral/deferral.h"
#include "cc_ops/core/deferral/deferred_contents.h"

namespace slipstream {

// A view of the caller's buffers. Entry p, in [0, capacity), is the deferred gradient of keys[p].
struct DeferredBuffers {
  // Key of a free entry. A gradient with this key is never deferred.
  static constexpr int64_t kFree = std::numeric_limits<int64_t>::min();

  int64_t* keys;   // [capacity]; each key once, except kFree.
  int64_t* since;  // [capacity]; step in which the sum began.
  float* sums;     // [capacity, dim], row-major
  int64_t capacity;
  int64_t dim;  // Values per row.
};

// View of the rows of a step between its halves.
struct StepRows {
  const int64_t* keys;  // [n], without repeats.
  int64_t n;
  const int64_t* indices;  // [n], as written by AddDeferred.
  const float* sums;       // [n, dim], as written by AddDeferred.
  const bool* may_wait;    // [n]; used only with DeferralRule::by_movement.
  KeySetView saturated;    // Keys whose sums may wait; used only without by_movement.
};

// Counts of one step.
struct StepCounts : UpdateCounts {
  int64_t num_deferred = 0;  // Number of deferred gradients after the step.
  int64_t next_due = 0;      // Part of num_deferred: due by age in the next step.
};

// First half of a step: adds the deferred gradients to the gradients.
//
//   keys       [n], without repeats.
//   gradients  [n, dim].
//   indices    [n]: entry of the key's deferred gradient in the buffers, or -1.
//   sums       [n, dim]: gradient plus deferred gradient.
//
// Returns InvalidArgument if a key is repeated.
Status AddDeferred(const DeferredBuffers& buffers, const int64_t* keys, const float* gradients,
                   int64_t n, int64_t* indices, float* sums);

// The changes of the second half, computed before any of them is made.
struct StepPlan {
  std::vector<Decision> decisions;  // [n]
  std::vector<uint8_t> is_freed;    // [capacity]; whether the sum of an entry leaves the buffers.
  std::vector<int64_t> targets;     // [n]; the entry that stores the sum of a row, or -1 if due.
  std::vector<int64_t> due_keys;    // Ascending, without repeats.
  std::vector<float> due_sums;      // [due, dim]
  StepCounts counts;
};

// Second half: removes the sums that are due and stores the others. New sums take free entries in
// ascending order, in the order of `rows`. FindDue only fills `plan`, and returns InvalidArgument
// if `rows.indices` has an entry of another key. KeepOthers makes the planned changes and allocates
// no memory.
Status FindDue(const DeferredBuffers& buffers, const DeferralRule& rule, const StepRows& rows,
               StepPlan* plan);
void KeepOthers(const DeferredBuffers& buffers, const DeferralRule& rule, const StepRows& rows,
                const StepPlan& plan);

// Bounds the number of rows that leave in a step before the device has computed it. An age is known
// a step in advance, therefore the counts of the last step bound the next one.
class DueBound {
 public:
  // Sets the number of deferred gradients, whose ages are unknown. The counts of `step`, the last
  // launched step, and of earlier steps are ignored from now on.
  void Reset(int64_t num_deferred, int64_t step);

  // Returns the maximum number of rows that leave in a step with n rows. `rule` is the rule of the
  // step, and `capacity` the capacity of the buffers.
  int64_t MaxDue(const DeferralRule& rule, int64_t n, int64_t capacity) const;

  int64_t num_deferred() const { return num_deferred_; }

  // Notes that a step with n rows is launched.
  void Launch(int64_t n);

  // Takes the counts of a launched step, or null if the step failed without changes, so that the
  // next step has its number. Steps may finish in any order. `rule` and `n` are the same as before.
  void Finish(const DeferralRule& rule, int64_t n, const StepCounts* counts);

 private:
  int64_t min_step_ = 0;      // Counts of earlier steps are outdated.
  int64_t num_deferred_ = 0;  // After the last finished step.
  int64_t next_due_ = 0;      // As in StepCounts, with the maximum age max_age_.
  int64_t max_age_ = 0;       // 0 if next_due_ is unknown.
  // Steps that are not finished, and their rows.
  int64_t steps_in_flight_ = 0, rows_in_flight_ = 0;
};

// Exports deferred gradients, oldest first, then by key. step: number of the last step, from which
// ages are counted; `ranks` of the result stays empty.
DeferredContents ExportDeferred(const DeferredBuffers& buffers, int64_t step);

// Replaces all deferred gradients by contents in any order. step: as in ExportDeferred. Returns
// InvalidArgument, without changes, in the cases of CheckDeferred, if the buffers are too small,
// and if a key is repeated or is kFree.
Status ImportDeferred(const DeferredContents& contents, int64_t step,
                      const DeferredBuffers& buffers);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_H_
