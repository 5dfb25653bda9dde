// CUDA launchers of deferred gradients in flat buffers (see deferred_buffers.h): raw device
// pointers and a stream.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc_ops/core/deferral/deferred_buffers.h"
#include "cc_ops/core/gpu/device_workspace.h"

namespace slipstream {

// Most rows and entries of one launch, together.
constexpr int64_t kMaxDeferredRows = (int64_t{1} << 30) - 1;

// Bytes of device memory that each half of a step needs beside its results; it may be the same
// memory. Returns the error of cub's size query, which needs a device.
cudaError_t DeferralWorkspaceBytes(int64_t n, int64_t capacity, size_t* bytes);

// Enqueue the halves of a step on `stream`; return at once and never wait for the device. Between
// them the caller decides which sums may wait.
//
//   buffers, rows      views of device memory.
//   workspace          DeferralWorkspaceBytes(n, buffers.capacity) bytes.
//   indices, sums      [n] and [n, dim]; see AddDeferred.
//   due_keys, due_sums [n + buffers.capacity] and that by dim; the first counts->sent rows are
//                      written.
//   counts             one value.
//
// A hash table of the deferred keys is made anew in every step: a step looks at all of them anyhow,
// there are no traces of keys that left, and nothing but the buffers is kept from step to step.
//
// All pointers are to device memory that the caller owns and keeps until the stream has passed.
// Equals the CPU's result bit for bit. What that refuses is not found here: of a key that is given
// twice a gradient may be lost, and an entry that is not the key's counts as -1.
// cudaErrorInvalidValue if n + capacity > kMaxDeferredRows or the workspace is too small; otherwise
// the launches' error. Errors while running appear when the caller synchronizes.
cudaError_t LaunchAddDeferred(cudaStream_t stream, const DeferredBuffers& buffers,
                              const int64_t* keys, const float* gradients, int64_t n,
                              const DeviceWorkspace& workspace, int64_t* indices, float* sums);

cudaError_t LaunchTakeDue(cudaStream_t stream, const DeferredBuffers& buffers,
                          const DeferralRule& rule, const StepRows& rows,
                          const DeviceWorkspace& workspace, int64_t* due_keys, float* due_sums,
                          StepCounts* counts);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_BUFFERS_CU_H_
