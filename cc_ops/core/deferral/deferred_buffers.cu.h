// CUDA launchers of deferred gradients in flat buffers (see deferred_buffers.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc_ops/core/deferral/deferred_buffers.h"
#include "cc_ops/core/gpu/device_workspace.h"

namespace slipstream {

// Maximum number of rows and entries of a launch, together.
constexpr int64_t kMaxDeferredRows = (int64_t{1} << 30) - 1;

// Counts of a step in device memory.
struct DeviceStepCounts : StepCounts {
  // 0, or 1 + the number of an invalid row: its key occurs twice, or its index is an entry of
  // another key. The buffers are unchanged then, and the other counts are undefined.
  int64_t invalid_row = 0;
};

// Store in `bytes` the size of the device memory that each half of a step needs in addition to its
// results. Both halves may use the same memory. It does not depend on the capacity of the buffers.
// Return cudaErrorInvalidValue if there are more than kMaxDeferredRows rows, otherwise the error of
// cub's size query, which needs a device.
cudaError_t AddDeferredWorkspaceBytes(int64_t n, size_t* bytes);
cudaError_t TakeDueWorkspaceBytes(int64_t n, int64_t max_due, size_t* bytes);

// Enqueue the halves of a step on `stream` and return immediately, without waiting for the device.
// In between the caller decides which sums may wait.
//
//   buffers, rows       Views of device memory.
//   workspace           At least the bytes of the functions above.
//   indices, sums       [n] and [n, dim], as in AddDeferred (deferred_buffers.h). A
//                       repeated key has the index -2 in all rows except one, which
//                       LaunchTakeDue rejects.
//   max_due             Maximum number of rows that leave, at least n; see DueBound. If more sums
//                       are due, those without a gradient that are too many leave in later steps.
//   due_keys, due_sums  [max_due] and [max_due, dim]; the first counts->sent rows are written.
//   counts              One value.
//
// Every step builds a hash table of the keys of the step and reads all deferred keys. Therefore
// only the buffers have state, and removed keys leave no tombstones.
//
// All pointers are to device memory that the caller owns and keeps until the stream has passed. The
// result has the CPU's bits (see DESIGN.md) if max_due is large enough. Invalid rows are counted;
// see DeviceStepCounts. Returns cudaErrorInvalidValue if n or max_due plus the capacity exceeds
// kMaxDeferredRows, if max_due < n, or if the workspace is too small, otherwise the launch error.
// Runtime errors appear when the caller synchronizes.
cudaError_t LaunchAddDeferred(cudaStream_t stream, const DeferredBuffers& buffers,
                              const int64_t* keys, const float* gradients, int64_t n,
                              const DeviceWorkspace& workspace, int64_t* indices, float* sums);

cudaError_t LaunchTakeDue(cudaStream_t stream, const DeferredBuffers& buffers,
                          const DeferralRule& rule, const StepRows& rows, int64_t max_due,
                          const DeviceWorkspace& workspace, int64_t* due_keys, float* due_sums,
                          DeviceStepCounts* counts);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_CU_H_
