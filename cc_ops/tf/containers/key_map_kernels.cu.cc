// GPU kernels of key maps: launches on the op's own stream, no device code here.
#define EIGEN_USE_GPU
#include "cc_ops/tf/containers/key_map_kernels.h"

#include "cc_ops/core/containers/key_probe.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/containers/table_on_gpu.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status CheckNumber(int64_t n) {
  if (n <= kMaxProbedKeys) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("there are ", n, " keys; allowed: up to ", kMaxProbedKeys));
}

class AssignKeyMapGpuKernel : public AssignKeyMapKernel {
 public:
  using AssignKeyMapKernel::AssignKeyMapKernel;

 private:
  absl::Status CopyToDevice(OpKernelContext* context, KeyMapContent* content) override {
    return CopyToGpu(context, content->keys.view(),
                     "SlipstreamKeyMapAssign could not copy the map to the GPU",
                     &content->on_device);
  }
};

class ProbeFrozenGpuKernel : public CountedGpuKernel {
 public:
  using CountedGpuKernel::CountedGpuKernel;

 private:
  class ProbeLaunch : public Launch {
   public:
    std::shared_ptr<const KeyMapContent> frozen;
    Tensor workspace, places, hits, misses, num_hits, num_hits_on_host;

   private:
    absl::Status SetOutputs(OpKernelContext* context) const override {
      const int64_t found = num_hits_on_host.flat<int64_t>()(0);
      context->set_output(0, places);
      // The first of the full-size buffers, which are freed with these outputs.
      context->set_output(1, hits.Slice(0, found));
      context->set_output(2, misses.Slice(0, places.NumElements() - found));
      return absl::OkStatus();
    }
  };

  absl::Status Enqueue(OpKernelContext* context, std::unique_ptr<Launch>* pending) override {
    auto launch = std::make_unique<ProbeLaunch>();
    TF_RETURN_IF_ERROR(ReadKeyMap(context, &launch->frozen));
    const Tensor& keys = context->input(1);
    const int64_t n = keys.NumElements();
    TF_RETURN_IF_ERROR(CheckNumber(n));
    size_t workspace_bytes = 0;
    TF_RETURN_IF_ERROR(Checked(FrozenProbeWorkspaceBytes(n, &workspace_bytes),
                               "SlipstreamProbeFrozen could not ask for its workspace"));
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8,
                                              TensorShape({static_cast<int64_t>(workspace_bytes)}),
                                              &launch->workspace));
    for (Tensor* positions : {&launch->places, &launch->hits, &launch->misses}) {
      TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, keys.shape(), positions));
    }
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, TensorShape({1}), &launch->num_hits));
    TF_RETURN_IF_ERROR(AllocateOnHost(context, 1, &launch->num_hits_on_host));
    const cudaStream_t stream = StreamOf(context);
    int64_t* const num_hits = launch->num_hits.flat<int64_t>().data();
    TF_RETURN_IF_ERROR(
        Checked(LaunchFrozenProbe(stream, keys.flat<int64_t>().data(), n,
                                  ViewOnGpu(launch->frozen->keys.view(), launch->frozen->on_device),
                                  launch->workspace.flat<uint8_t>().data(), workspace_bytes,
                                  launch->places.flat<int64_t>().data(),
                                  launch->hits.flat<int64_t>().data(),
                                  launch->misses.flat<int64_t>().data(), num_hits),
                "SlipstreamProbeFrozen could not be launched"));
    TF_RETURN_IF_ERROR(
        Checked(cudaMemcpyAsync(launch->num_hits_on_host.flat<int64_t>().data(), num_hits,
                                sizeof(*num_hits), cudaMemcpyDeviceToHost, stream),
                "SlipstreamProbeFrozen could not copy its count"));
    *pending = std::move(launch);
    return absl::OkStatus();
  }
};

// TensorFlow reuses the memory of a content that was replaced in the order of this stream.
class LookUpStatesGpuKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<const KeyMapContent> known;
    OP_REQUIRES_OK(context, ReadKeyMap(context, &known));
    const Tensor& keys = context->input(1);
    OP_REQUIRES_OK(context, CheckNumber(keys.NumElements()));
    Tensor* states = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, keys.shape(), &states));
    OP_REQUIRES_OK(context,
                   Checked(LaunchStateLookup(StreamOf(context), keys.flat<int64_t>().data(),
                                             keys.NumElements(),
                                             ViewOnGpu(known->keys.view(), known->on_device),
                                             states->flat<uint8_t>().data()),
                           "SlipstreamLookUpStates could not be launched"));
  }
};

REGISTER_KERNEL_BUILDER(
    Name("SlipstreamKeyMap").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
    MemoryChecked<CreateResourceKernel<KeyMapResource>>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamKeyMapAssign")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("keys")
                            .HostMemory("states"),
                        MemoryChecked<AssignKeyMapGpuKernel>);
REGISTER_KERNEL_BUILDER(
    Name("SlipstreamProbeFrozen").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
    ProbeFrozenGpuKernel);
REGISTER_KERNEL_BUILDER(
    Name("SlipstreamLookUpStates").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
    MemoryChecked<LookUpStatesGpuKernel>);

}  // namespace
}  // namespace slipstream
