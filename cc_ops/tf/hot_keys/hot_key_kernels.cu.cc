// GPU kernels of the sketch of hot keys: launches on the op's own stream, no device code here.
#define EIGEN_USE_GPU
#include "cc_ops/tf/hot_keys/hot_key_kernels.h"

#include <vector>

#include "cc_ops/core/hot_keys/access_sketch.cu.h"
#include "cc_ops/core/hot_keys/hot_key_sketch.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

struct GpuDevice {
  static absl::Status Fill(OpKernelContext* context, int64_t value, Tensor* values) {
    const std::vector<int64_t> on_host(static_cast<size_t>(values->NumElements()), value);
    // Pageable memory: returns when it has been read. Once per sketch.
    return Checked(cudaMemcpyAsync(values->data(), on_host.data(), values->TotalBytes(),
                                   cudaMemcpyHostToDevice, StreamOf(context)),
                   "SlipstreamHotKeys could not fill its memory");
  }
};

class CountAccessesGpuKernel : public HotKeysKernel {
 public:
  explicit CountAccessesGpuKernel(tensorflow::OpKernelConstruction* context)
      : HotKeysKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("unit", &unit_));
  }

 private:
  absl::Status Run(OpKernelContext* context, HotKeysResource* resource) override {
    const Tensor &keys = context->input(1), &counts = context->input(2);
    TF_RETURN_IF_ERROR(CheckCounted(keys, counts));
    return Checked(
        LaunchCountAccesses(StreamOf(context), resource->View(), keys.flat<int64_t>().data(),
                            counts.flat<bool>().data(), keys.NumElements(), unit_),
        "SlipstreamCountAccesses could not be launched");
  }

  int64_t unit_ = 1;
};

class DecayAccessesGpuKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(OpKernelContext* context, HotKeysResource* resource) override {
    uint64_t factor = 0;
    TF_RETURN_IF_ERROR(ReadFactor(context, &factor));
    return Checked(LaunchDecayAccesses(StreamOf(context), resource->View().sketch, factor),
                   "SlipstreamDecayAccesses could not be launched");
  }
};

class HotKeyCandidatesGpuKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(OpKernelContext* context, HotKeysResource* resource) override {
    Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, resource->owners.shape(), &keys));
    return Checked(cudaMemcpyAsync(keys->data(), resource->owners.data(), keys->TotalBytes(),
                                   cudaMemcpyDeviceToDevice, StreamOf(context)),
                   "SlipstreamHotKeyCandidates could not copy the keys");
  }
};

class EstimateAccessesGpuKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(OpKernelContext* context, HotKeysResource* resource) override {
    const Tensor& keys = context->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(keys));
    Tensor* estimates = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, keys.shape(), &estimates));
    return Checked(LaunchEstimateAccesses(StreamOf(context), resource->View().sketch,
                                          keys.flat<int64_t>().data(), keys.NumElements(),
                                          estimates->flat<int64_t>().data()),
                   "SlipstreamEstimateAccesses could not be launched");
  }
};

#define REGISTER_GPU(name, Kernel)                                                        \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("handle"), \
                          MemoryChecked<Kernel>)
REGISTER_GPU("SlipstreamHotKeys", CreateHotKeysKernel<GpuDevice>);
REGISTER_GPU("SlipstreamCountAccesses", CountAccessesGpuKernel);
REGISTER_GPU("SlipstreamHotKeyCandidates", HotKeyCandidatesGpuKernel);
REGISTER_GPU("SlipstreamEstimateAccesses", EstimateAccessesGpuKernel);
#undef REGISTER_GPU
REGISTER_KERNEL_BUILDER(Name("SlipstreamDecayAccesses")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("factor"),
                        MemoryChecked<DecayAccessesGpuKernel>);

}  // namespace
}  // namespace slipstream
