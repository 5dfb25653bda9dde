// CUDA launcher of the classification by drift (see drift_classification.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_CU_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cc_ops/core/saturation/drift_classification.h"
#include "cc_ops/core/saturation/drift_index.h"

namespace slipstream {

// Enqueues the classification on `stream`; returns at once and never waits for the device.
//
//   drifts   its entries are in device memory.
//   scratch  as many values as there are lookups; read and written only for inputs with more than
//            32 lookups, and not if alpha is 1, so that it may then be null.
//
// The other arguments are those of ClassifyByDrift. All pointers, those in `lookups` and `result`
// too, are to device memory that the caller owns and keeps until the stream has passed. Equals the
// CPU's result byte for byte. Offsets that are not sound are read as the nearest that are in range:
// nobody can be told of them. cudaErrorInvalidValue for modes by losses; otherwise the launch's
// error. Errors while running appear when the caller synchronizes.
cudaError_t LaunchClassifyByDrift(cudaStream_t stream, const DriftIndexView& drifts,
                                  const DriftClassifier& classifier, const LookupLists& lookups,
                                  uint64_t first_number, uint32_t* scratch,
                                  const Classified& result);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_CU_H_
