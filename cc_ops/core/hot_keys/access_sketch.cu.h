// CUDA launchers of the access sketch (see access_sketch.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_CU_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cc_ops/core/hot_keys/access_sketch.h"

namespace slipstream {

// All launchers enqueue on `stream` and return immediately, without waiting for the device. All
// pointers, including the counters of the sketch, are to device memory that the caller owns and
// keeps until the stream has finished the work. Results equal the CPU's. The launch error is
// returned; runtime errors appear when the caller synchronizes.

// Same as DecayAccesses.
cudaError_t LaunchDecayAccesses(cudaStream_t stream, const AccessSketch& sketch, uint64_t factor);

// Same as EstimateAccesses. keys, estimates: [n].
cudaError_t LaunchEstimateAccesses(cudaStream_t stream, const AccessSketch& sketch,
                                   const int64_t* keys, int64_t n, int64_t* estimates);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_ACCESS_SKETCH_CU_H_
