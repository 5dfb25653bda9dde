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

// Stores in `bytes` the size of the device memory that each half of a step needs in addition to its
// results. Both halves may use the same memory. Returns the error of cub's size query, which needs
// a device.
cudaError_t DeferralWorkspaceBytes(int64_t n, int64_t capacity, size_t* bytes);

// Enqueue the halves of a step on `stream` and return immediately, without waiting for the device.
// In between the caller decides which sums may wait.
//
//   buffers, rows       Views of device memory.
//   workspace           DeferralWorkspaceBytes(n, buffers.capacity) bytes.
//   indices, sums       [n] and [n, dim], as in AddDeferred (deferred_buffers.h).
//   due_keys, due_sums  [n + buffers.capacity] and [n + buffers.capacity, dim]; the first
//                       counts->sent rows are written.
//   counts              One value.
//
// Every step builds a hash table of the deferred keys, because it reads all of them anyway.
// Therefore only the buffers have state, and removed keys leave no tombstones.
//
// All pointers are to device memory that the caller owns and keeps until the stream has passed. The
// result equals the CPU's bit for bit. Errors in the data are not detected: the gradient of a
// repeated key may be lost, and an entry that does not belong to its key counts as -1. Returns
// cudaErrorInvalidValue if n + capacity > kMaxDeferredRows or if the workspace is too small,
// otherwise the launch error. Runtime errors appear when the caller synchronizes.
cudaError_t LaunchAddDeferred(cudaStream_t stream, const DeferredBuffers& buffers,
                              const int64_t* keys, const float* gradients, int64_t n,
                              const DeviceWorkspace& workspace, int64_t* indices, float* sums);

cudaError_t LaunchTakeDue(cudaStream_t stream, const DeferredBuffers& buffers,
                          const DeferralRule& rule, const StepRows& rows,
                          const DeviceWorkspace& workspace, int64_t* due_keys, float* due_sums,
                          StepCounts* counts);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_CU_H_
