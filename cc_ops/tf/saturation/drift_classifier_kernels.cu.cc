// GPU kernels of the classification by drift: they launch functions of cc_ops/core
// on the stream of the op.
#define EIGEN_USE_GPU
#include "cc_ops/tf/saturation/drift_classifier_kernels.h"

#include "cc_ops/core/saturation/drift_classification.cu.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/containers/table_on_gpu.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

struct ClassifierOnGpu {
  // The lookups are in GPU memory.
  static absl::Status CheckSplits(const LookupLists& /*lookups*/) { return absl::OkStatus(); }

  static absl::Status Classify(OpKernelContext* context, const DriftContent& content,
                               const DriftClassifier& classifier, const LookupLists& lookups,
                               uint64_t first_number, const Classified& result) {
    // TensorFlow reuses this memory, and drifts that were replaced, in the order of this stream.
    Tensor scratch;
    const int64_t values = classifier.alpha == 1.0 ? 0 : lookups.num_lookups;
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_UINT32, TensorShape({values}), &scratch));
    return Checked(
        context,
        LaunchClassifyByDrift(StreamOf(context), ViewOnGpu(content), classifier, lookups,
                              first_number, static_cast<uint32_t*>(scratch.data()), result),
        "could not be launched");
  }
};

SLIPSTREAM_GPU_KERNEL("SlipstreamDriftClassifier", .HostMemory("alpha"),
                      FunctionKernel<CreateDriftClassifier>);
SLIPSTREAM_GPU_KERNEL("SlipstreamDriftClassifierSetDrift",
                      .HostMemory("tables").HostMemory("keys").HostMemory("drift"),
                      ResourceKernel<SetDrifts<OnGpu>>);
SLIPSTREAM_GPU_KERNEL(
    "SlipstreamDriftClassifierConfigure",
    .HostMemory("threshold").HostMemory("random_fraction").HostMemory("keep_rate"),
    ResourceKernel<ConfigureDriftClassifier>);
SLIPSTREAM_GPU_KERNEL("SlipstreamClassifyByDrift", ,
                      ResourceKernel<ClassifyBatch<ClassifierOnGpu>>);

}  // namespace
}  // namespace slipstream
