// CUDA launchers of the access sketch (see access_sketch.h): raw device pointers and a stream.
#ifndef SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc_ops/core/hot_keys/access_sketch.h"

namespace slipstream {

// Most candidates of one launch.
constexpr int64_t kMaxCandidates = (int64_t{1} << 31) - 1;

// All enqueue on `stream`, return at once and never wait for the device. All pointers, that of the
// sketch's counters too, are to device memory that the caller owns and keeps until the stream has
// passed. Results equal the CPU's. They return the launches' error; errors while running appear
// when the caller synchronizes.

// See AddAccesses; keys [n], accesses [n] or null.
cudaError_t LaunchAddAccesses(cudaStream_t stream, const AccessSketch& sketch, const int64_t* keys,
                              const uint32_t* accesses, int64_t n);

// See DecayAccesses.
cudaError_t LaunchDecayAccesses(cudaStream_t stream, const AccessSketch& sketch, uint64_t factor);

// See EstimateAccesses; keys, estimates [n].
cudaError_t LaunchEstimateAccesses(cudaStream_t stream, const AccessSketch& sketch,
                                   const int64_t* keys, int64_t n, int64_t* estimates);

// Bytes of device memory that LaunchTopAccessed needs beside its results. Returns the error of
// cub's size query, which needs a device.
cudaError_t TopAccessedWorkspaceBytes(int64_t n, size_t* bytes);

// See TopAccessed; candidates [n], top_keys and top_estimates [k].
//   workspace: TopAccessedWorkspaceBytes(n) bytes, 256-byte aligned.
// cudaErrorInvalidValue also if k > n, n > kMaxCandidates or the workspace is too small.
cudaError_t LaunchTopAccessed(cudaStream_t stream, const AccessSketch& sketch,
                              const int64_t* candidates, int64_t n, int64_t k, void* workspace,
                              size_t workspace_bytes, int64_t* top_keys, int64_t* top_estimates);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_CU_H_
