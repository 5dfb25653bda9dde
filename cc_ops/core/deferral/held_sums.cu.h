// CUDA launchers of the held sums (see held_sums.h): raw device pointers and a stream.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_HELD_SUMS_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_HELD_SUMS_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc_ops/core/deferral/held_sums.h"

namespace slipstream {

// Most rows and places of one launch, together.
constexpr int64_t kMaxHeldRows = (int64_t{1} << 30) - 1;

// Bytes of device memory that each half of a step needs beside its results; it may be the same
// memory. Returns the error of cub's size query, which needs a device.
cudaError_t HeldSumsWorkspaceBytes(int64_t n, int64_t capacity, size_t* bytes);

// Enqueue the halves of a step on `stream`; return at once and never wait for the device. Between
// them the caller judges the sums.
//
//   held           its buffers are in device memory.
//   workspace      HeldSumsWorkspaceBytes(n, held.capacity) bytes, 256-byte aligned.
//   places, sums   [n] and [n, dim]; see AddToHeld.
//   may_wait       [n], read if rule.by_movement; null otherwise.
//   marked         its slots are in device memory; read otherwise.
//   leaving_keys, leaving_sums
//                  [n + held.capacity] and that by dim; the first counts->leaving rows are written.
//   counts         one value.
//
// An index of the held keys is made anew in every step: a step looks at all places anyhow, there
// are no traces of keys that left, and nothing but the buffers is kept from step to step.
//
// All pointers are to device memory that the caller owns and keeps until the stream has passed.
// Equals the CPU's result bit for bit. What that refuses is not found here: of a key that is given
// twice a gradient may be lost, and a place that is none of the key's counts as -1.
// cudaErrorInvalidValue if n + capacity > kMaxHeldRows or the workspace is too small; otherwise the
// launches' error. Errors while running appear when the caller synchronizes.
cudaError_t LaunchAddToHeld(cudaStream_t stream, const HeldSums& held, const int64_t* keys,
                            const float* gradients, int64_t n, void* workspace,
                            size_t workspace_bytes, int64_t* places, float* sums);

cudaError_t LaunchTakeDue(cudaStream_t stream, const HeldSums& held, const HoldRule& rule,
                          const int64_t* keys, int64_t n, const int64_t* places, const float* sums,
                          const bool* may_wait, const KeySetView& marked, void* workspace,
                          size_t workspace_bytes, int64_t* leaving_keys, float* leaving_sums,
                          HeldCounts* counts);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_HELD_SUMS_CU_H_
