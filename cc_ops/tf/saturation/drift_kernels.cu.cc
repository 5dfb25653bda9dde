// GPU kernel of SlipstreamRowDrift: launches on the op's own stream, no device code here.
#define EIGEN_USE_GPU
#include "cc_ops/tf/saturation/drift_kernels.h"

#include "cc_ops/core/saturation/drift.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

class RowDriftGpuOp : public RowDriftOpBase {
 public:
  using RowDriftOpBase::RowDriftOpBase;

 protected:
  absl::Status Run(tensorflow::OpKernelContext* context, const tensorflow::Tensor& current,
                   const tensorflow::Tensor& snapshot, tensorflow::Tensor* drift) override {
    return Checked(
        LaunchRowDrift(StreamOf(context), current.flat<float>().data(),
                       snapshot.flat<float>().data(), current.dim_size(0), current.dim_size(1),
                       metric_, epsilon_, drift->flat<float>().data()),
        "SlipstreamRowDrift could not be launched");
  }
};

REGISTER_KERNEL_BUILDER(Name("SlipstreamRowDrift").Device(tensorflow::DEVICE_GPU),
                        MemoryChecked<RowDriftGpuOp>);

}  // namespace
}  // namespace slipstream
