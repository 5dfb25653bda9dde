// GPU kernels of the classification by drift: launches on the op's own stream, no device code here.
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

class SetDriftsGpuKernel : public SetDriftsKernel {
 public:
  using SetDriftsKernel::SetDriftsKernel;

 private:
  absl::Status CopyToDevice(OpKernelContext* context, DriftContent* content) override {
    return CopyToGpu(context, content->drifts.view(),
                     "SlipstreamDriftClassifierSetDrift could not copy the drifts to the GPU",
                     &content->on_device);
  }
};

class ClassifyByDriftGpuKernel : public ClassifyByDriftKernel {
 public:
  using ClassifyByDriftKernel::ClassifyByDriftKernel;

 private:
  absl::Status Classify(OpKernelContext* context, const DriftContent& content,
                        const DriftClassifier& classifier, const LookupLists& lookups,
                        uint64_t first_number, const Classified& result) override {
    const DriftIndexView view = ViewOnGpu(content.drifts.view(), content.on_device);
    // TensorFlow reuses this memory, and drifts that were replaced, in the order of this stream.
    Tensor scratch;
    const int64_t values = classifier.alpha == 1.0 ? 0 : lookups.num_lookups;
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_UINT32, TensorShape({values}), &scratch));
    return Checked(LaunchClassifyByDrift(StreamOf(context), view, classifier, lookups, first_number,
                                         static_cast<uint32_t*>(scratch.data()), result),
                   "SlipstreamClassifyByDrift could not be launched");
  }
};

REGISTER_KERNEL_BUILDER(Name("SlipstreamDriftClassifier")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("alpha")
                            .HostMemory("handle"),
                        MemoryChecked<CreateDriftClassifierKernel>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamDriftClassifierSetDrift")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("tables")
                            .HostMemory("keys")
                            .HostMemory("drift"),
                        MemoryChecked<SetDriftsGpuKernel>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamDriftClassifierConfigure")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("threshold")
                            .HostMemory("random_share")
                            .HostMemory("keep_rate"),
                        MemoryChecked<ConfigureDriftClassifierKernel>);
REGISTER_KERNEL_BUILDER(
    Name("SlipstreamClassifyByDrift").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
    MemoryChecked<ClassifyByDriftGpuKernel>);

}  // namespace
}  // namespace slipstream
