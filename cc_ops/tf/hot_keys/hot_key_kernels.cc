// CPU kernels of the sketch of hot keys: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/hot_keys/hot_key_kernels.h"

#include <algorithm>

#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

struct CpuDevice {
  static absl::Status Fill(OpKernelContext* /*context*/, int64_t value, Tensor* values) {
    std::fill_n(values->flat<int64_t>().data(), values->NumElements(), value);
    return absl::OkStatus();
  }
};

class CountAccessesCpuKernel : public HotKeysKernel {
 public:
  explicit CountAccessesCpuKernel(tensorflow::OpKernelConstruction* context)
      : HotKeysKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("unit", &unit_));
  }

 private:
  absl::Status Run(OpKernelContext* context, HotKeysResource* resource) override {
    const Tensor &keys = context->input(1), &counts = context->input(2);
    TF_RETURN_IF_ERROR(CheckCounted(keys, counts));
    CountAccesses(resource->View(), keys.flat<int64_t>().data(), counts.flat<bool>().data(),
                  keys.NumElements(), unit_);
    return absl::OkStatus();
  }

  int64_t unit_ = 1;
};

class DecayAccessesCpuKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(OpKernelContext* context, HotKeysResource* resource) override {
    uint64_t factor = 0;
    TF_RETURN_IF_ERROR(ReadFactor(context, &factor));
    DecayAccesses(resource->View().sketch, factor);
    return absl::OkStatus();
  }
};

class HotKeyCandidatesCpuKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(OpKernelContext* context, HotKeysResource* resource) override {
    Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, resource->owners.shape(), &keys));
    std::copy_n(resource->owners.flat<int64_t>().data(), resource->num_counters(),
                keys->flat<int64_t>().data());
    return absl::OkStatus();
  }
};

class EstimateAccessesCpuKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(OpKernelContext* context, HotKeysResource* resource) override {
    const Tensor& keys = context->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(keys));
    Tensor* estimates = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, keys.shape(), &estimates));
    EstimateAccesses(resource->View().sketch, keys.flat<int64_t>().data(), keys.NumElements(),
                     estimates->flat<int64_t>().data());
    return absl::OkStatus();
  }
};

#define REGISTER_CPU(name, Kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), MemoryChecked<Kernel>)
REGISTER_CPU("SlipstreamHotKeys", CreateHotKeysKernel<CpuDevice>);
REGISTER_CPU("SlipstreamCountAccesses", CountAccessesCpuKernel);
REGISTER_CPU("SlipstreamDecayAccesses", DecayAccessesCpuKernel);
REGISTER_CPU("SlipstreamHotKeyCandidates", HotKeyCandidatesCpuKernel);
REGISTER_CPU("SlipstreamEstimateAccesses", EstimateAccessesCpuKernel);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
