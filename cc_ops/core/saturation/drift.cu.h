// CUDA launcher of the row drift (see drift.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CU_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cc_ops/core/base/drift.h"

namespace slipstream {

// Enqueues the drift of all rows on `stream` and returns immediately.
//
//   current, snapshot  [rows, dim], row-major, in device memory, owned by the caller.
//   drift              [rows], in device memory, owned by the caller.
//
// Linf has the CPU's bits (see DESIGN.md). L2 sums in another order, which depends only on `dim`
// and on whether rows are aligned to 16 bytes; aligned rows are read faster. Returns the launch
// error; runtime errors appear when the caller synchronizes.
cudaError_t LaunchRowDrift(cudaStream_t stream, const float* current, const float* snapshot,
                           int64_t rows, int64_t dim, DriftMetric metric, float* drift);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CU_H_
