// CUDA launcher of CountAccesses (see hot_key_sketch.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_CU_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cc_ops/core/hot_keys/hot_key_sketch.h"

namespace slipstream {

// Enqueues CountAccesses on `stream` and returns immediately, without waiting for the device. All
// pointers, including the members of the sketch, are to device memory that the caller owns and
// keeps until the stream has passed. The result equals the CPU's. Returns cudaErrorInvalidValue if
// n > HotKeySketch::kMaxBatch, otherwise the launch error. Runtime errors appear when the caller
// synchronizes.
cudaError_t LaunchCountAccesses(cudaStream_t stream, const HotKeySketch& hot, const int64_t* keys,
                                const bool* counts, int64_t n, int64_t unit);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_HOT_KEYS_HOT_KEY_SKETCH_CU_H_
