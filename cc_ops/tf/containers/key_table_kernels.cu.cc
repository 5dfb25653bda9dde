// GPU kernels of key maps and key sets: launches on the op's own stream, no device code here.
#define EIGEN_USE_GPU
#include "cc_ops/tf/containers/key_table_kernels.h"

#include "cc_ops/core/containers/key_probe.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/containers/table_on_gpu.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status CheckKeys(OpKernelContext* context) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "keys: [n]"));
  const int64_t n = context->input(1).NumElements();
  if (n <= kMaxProbedKeys) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("there are ", n, " keys; allowed: up to ", kMaxProbedKeys));
}

class ProbeGpuKernel : public CountedGpuKernel {
 public:
  using CountedGpuKernel::CountedGpuKernel;

 private:
  class ProbeLaunch : public Launch {
   public:
    std::shared_ptr<const KeyMapContent> content;
    Tensor indices, hits, misses;

   private:
    absl::Status SetOutputs(OpKernelContext* context) const override {
      const int64_t found = counts_on_host.flat<int64_t>()(0);
      context->set_output(0, indices);
      // The first of the full-size buffers, which are freed with these outputs.
      context->set_output(1, hits.Slice(0, found));
      context->set_output(2, misses.Slice(0, indices.NumElements() - found));
      return absl::OkStatus();
    }
  };

  absl::Status Enqueue(OpKernelContext* context, std::unique_ptr<Launch>* launched) override {
    auto launch = std::make_unique<ProbeLaunch>();
    TF_RETURN_IF_ERROR(FindContent(context, 0, &launch->content));
    TF_RETURN_IF_ERROR(CheckKeys(context));
    const Tensor& keys = context->input(1);
    const int64_t n = keys.NumElements();
    size_t workspace_bytes = 0;
    TF_RETURN_IF_ERROR(
        Checked(context, ProbeWorkspaceBytes(n, &workspace_bytes), "could not size its workspace"));
    TF_RETURN_IF_ERROR(AllocateWorkspace(context, workspace_bytes, &launch->workspace));
    for (Tensor* positions : {&launch->indices, &launch->hits, &launch->misses}) {
      TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, keys.shape(), positions));
    }
    TF_RETURN_IF_ERROR(AllocateCounts(context, 1, launch.get()));
    TF_RETURN_IF_ERROR(Checked(
        context,
        LaunchProbe(StreamOf(context), keys.flat<int64_t>().data(), n, ViewOnGpu(*launch->content),
                    launch->workspace.data(), workspace_bytes,
                    launch->indices.flat<int64_t>().data(), launch->hits.flat<int64_t>().data(),
                    launch->misses.flat<int64_t>().data(), launch->counts.flat<int64_t>().data()),
        "could not be launched"));
    TF_RETURN_IF_ERROR(CopyCounts(context, launch.get()));
    *launched = std::move(launch);
    return absl::OkStatus();
  }
};

// TensorFlow reuses the memory of a content that was replaced in the order of this stream.
absl::Status LookUpStatesOnGpu(OpKernelContext* context, KeyMapResource* resource) {
  TF_RETURN_IF_ERROR(CheckKeys(context));
  const Tensor& keys = context->input(1);
  uint8_t* states = nullptr;
  TF_RETURN_IF_ERROR(Allocate(context, 0, keys.shape(), &states));
  const std::shared_ptr<const KeyMapContent> content = resource->content();
  return Checked(context,
                 LaunchStateLookup(StreamOf(context), keys.flat<int64_t>().data(),
                                   keys.NumElements(), ViewOnGpu(*content), states),
                 "could not be launched");
}

SLIPSTREAM_GPU_KERNEL("SlipstreamKeySet", , FunctionKernel<CreateResource<KeySetResource>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamKeySetAssign", .HostMemory("keys"),
                      ResourceKernel<AssignKeySet<OnGpu>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamKeyMap", , FunctionKernel<CreateResource<KeyMapResource>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamKeyMapAssign", .HostMemory("keys").HostMemory("states"),
                      ResourceKernel<AssignKeyMap<OnGpu>>);
REGISTER_KERNEL_BUILDER(SLIPSTREAM_ON_GPU("SlipstreamProbeKeys"), ProbeGpuKernel);
SLIPSTREAM_GPU_KERNEL("SlipstreamLookUpStates", , ResourceKernel<LookUpStatesOnGpu>);

}  // namespace
}  // namespace slipstream
