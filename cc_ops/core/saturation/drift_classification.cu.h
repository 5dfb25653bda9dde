// CUDA launcher of the classification by drift (see drift_classification.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_CU_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cc_ops/core/saturation/drift_classification.h"
#include "cc_ops/core/saturation/drift_index.h"

namespace slipstream {

// Enqueues the classification on `stream` and returns immediately, without waiting for the device.
//
//   drifts   Its entries are in device memory.
//   scratch  One value per lookup. Used only for examples with more than 32 lookups and if alpha
//            is not 1; may be null otherwise.
//
// The other arguments are as in ClassifyByDrift. All pointers, including those in `lookups` and
// `result`, are to device memory that the caller owns and keeps until the stream has passed. The
// result equals the CPU's byte for byte. Invalid offsets cannot be reported and are clamped to the
// valid range. Returns cudaErrorInvalidValue for SkipMode::kPredictedLoss, otherwise the launch
// error. Runtime errors appear when the caller synchronizes.
cudaError_t LaunchClassifyByDrift(cudaStream_t stream, const DriftIndexView& drifts,
                                  const DriftClassifier& classifier, const LookupLists& lookups,
                                  uint64_t first_number, uint32_t* scratch,
                                  const Classified& result);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_CU_H_
