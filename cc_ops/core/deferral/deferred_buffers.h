// Deferred gradients of a variable's rows, in flat buffers: what a step's gradients become, and
// which are due.
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

// A view, nothing is owned. Entry p is the deferred gradient of keys[p].
struct DeferredBuffers {
  // The key of a free entry. The gradient of a row that has this key leaves at once.
  static constexpr int64_t kFree = std::numeric_limits<int64_t>::min();

  int64_t* keys;   // [capacity], each but kFree once
  int64_t* since;  // [capacity], the step in which the sum began
  float* sums;     // [capacity, dim], row-major
  int64_t capacity;
  int64_t dim;  // values per row
};

// The rows of a step between its halves: a view.
struct StepRows {
  const int64_t* keys;  // [n], each once
  int64_t n;
  const int64_t* indices;  // [n] and
  const float* sums;       // [n, dim], as AddDeferred wrote them
  const bool* may_wait;    // [n], read if the rule goes by movement
  KeySetView saturated;    // the rows that may wait, read otherwise
};

struct StepCounts : UpdateCounts {
  int64_t num_deferred = 0;  // after the step
};

// First half of a step: what the sums would be.
//   keys      [n], each once.
//   gradients [n, dim].
//   indices   [n]: where the deferred gradient of a key is, or -1.
//   sums      [n, dim]: gradient and deferred gradient, added.
// InvalidArgument if a key is given twice.
Status AddDeferred(const DeferredBuffers& buffers, const int64_t* keys, const float* gradients,
                   int64_t n, int64_t* indices, float* sums);

// What the second half will do, found before anything is changed.
struct StepPlan {
  std::vector<Decision> decisions;  // [n]
  std::vector<uint8_t> is_freed;    // [capacity]
  std::vector<int64_t> targets;     // [n], the entry that a row's sum stays at, or -1
  std::vector<int64_t> due_keys;    // ascending, each once
  std::vector<float> due_sums;      // [due, dim]
  StepCounts counts;
};

// Second half: takes out what is due and keeps what may wait. Free entries are given to new sums in
// ascending order, for keys in theirs. InvalidArgument if a key's sum is not where `rows` says.
// FindDue changes nothing; KeepOthers needs no memory.
Status FindDue(const DeferredBuffers& buffers, const DeferralRule& rule, const StepRows& rows,
               StepPlan* plan);
void KeepOthers(const DeferredBuffers& buffers, const DeferralRule& rule, const StepRows& rows,
                const StepPlan& plan);

// What is deferred, the oldest first; of one age, by key. step: the last one.
DeferredContents ExportDeferred(const DeferredBuffers& buffers, int64_t step);

// Replaces all that is deferred. contents: in any order. InvalidArgument, changing nothing, as
// CheckDeferred, if the buffers have no room, or if a key comes twice or is kFree.
Status ImportDeferred(const DeferredContents& contents, int64_t step,
                      const DeferredBuffers& buffers);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_H_
