// GPU kernels of SlipstreamRowDrift: they launch functions of cc_ops/core on the stream of the op.
#define EIGEN_USE_GPU
#include "cc_ops/tf/saturation/drift_kernels.h"

#include "cc_ops/core/saturation/drift.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

struct DriftOnGpu {
  static absl::Status Run(tensorflow::OpKernelContext* context, int64_t rows, int64_t dim,
                          DriftMetric metric, float* drift) {
    return Checked(context,
                   LaunchRowDrift(StreamOf(context), Data<float>(context, 0),
                                  Data<float>(context, 1), rows, dim, metric, drift),
                   "could not be launched");
  }
};

REGISTER_KERNEL_BUILDER(Name("SlipstreamRowDrift").Device(tensorflow::DEVICE_GPU),
                        MemoryChecked<RowDriftKernel<DriftOnGpu>>);

}  // namespace
}  // namespace slipstream
