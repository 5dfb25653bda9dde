// GPU kernels of gradient masking: launches on the op's own stream, no device code
// here.
#define EIGEN_USE_GPU
#include "cc_ops/tf/update/mask_kernels.h"

#include "cc_ops/core/update/row_compaction.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class MaskLaunch : public CountedGpuKernel::Launch {
 public:
  std::shared_ptr<const KeySetContent> masked;
  Tensor workspace, kept_keys, kept_gradients, counts, counts_on_host;

 private:
  absl::Status SetOutputs(OpKernelContext* context) const override {
    const auto counted = counts_on_host.flat<int64_t>();
    const int64_t kept = counted(0), offered = counted(1);
    TF_RETURN_IF_ERROR(OutputScalar(context, 2, offered - kept));
    TF_RETURN_IF_ERROR(OutputScalar(context, 3, offered));
    // The first rows of the full-size buffers, which are freed with these outputs.
    context->set_output(0, kept_keys.Slice(0, kept));
    context->set_output(1, kept_gradients.Slice(0, kept));
    return absl::OkStatus();
  }
};

template <class Key>
class MaskGradientsGpuKernel : public CountedGpuKernel {
 public:
  explicit MaskGradientsGpuKernel(OpKernelConstruction* context) : CountedGpuKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("deduplicate", &deduplicate_));
  }

 private:
  absl::Status Enqueue(OpKernelContext* context, std::unique_ptr<Launch>* pending) override {
    auto owned = std::make_unique<MaskLaunch>();
    MaskLaunch* const launch = owned.get();
    tensorflow::core::RefCountPtr<KeySetResource> resource;
    TF_RETURN_IF_ERROR(FindKeySet(context, &resource));
    const Tensor &keys = context->input(1), &gradients = context->input(2);
    TF_RETURN_IF_ERROR(CheckGradients(keys, gradients));
    const int64_t n = keys.NumElements();
    if (n > kMaxCompactedRows) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradients have ", n, " rows; allowed: up to ", kMaxCompactedRows));
    }
    launch->masked = resource->content();
    size_t workspace_bytes = 0;
    TF_RETURN_IF_ERROR(Checked(CompactRowsWorkspaceBytes<Key>(n, deduplicate_, &workspace_bytes),
                               "SlipstreamMaskGradients could not ask for its workspace"));
    constexpr int64_t kCounts = sizeof(CompactionCounts) / sizeof(int64_t);
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8,
                                              TensorShape({static_cast<int64_t>(workspace_bytes)}),
                                              &launch->workspace));
    TF_RETURN_IF_ERROR(context->allocate_temp(keys.dtype(), keys.shape(), &launch->kept_keys));
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_FLOAT, gradients.shape(), &launch->kept_gradients));
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, TensorShape({kCounts}), &launch->counts));
    TF_RETURN_IF_ERROR(AllocateOnHost(context, kCounts, &launch->counts_on_host));
    auto* counts = static_cast<CompactionCounts*>(launch->counts.data());
    const cudaStream_t stream = StreamOf(context);
    const CompactionInput<Key> input = {
        keys.flat<Key>().data(), gradients.flat<float>().data(), n,
        RowSize(gradients),      ViewOnDevice(*launch->masked),  deduplicate_};
    TF_RETURN_IF_ERROR(
        Checked(LaunchCompactRows(stream, input, {launch->workspace.data(), workspace_bytes},
                                  launch->kept_keys.flat<Key>().data(),
                                  launch->kept_gradients.flat<float>().data(), counts),
                "SlipstreamMaskGradients could not be launched"));
    TF_RETURN_IF_ERROR(
        Checked(cudaMemcpyAsync(launch->counts_on_host.data(), counts, sizeof(CompactionCounts),
                                cudaMemcpyDeviceToHost, stream),
                "SlipstreamMaskGradients could not copy its counts"));
    *pending = std::move(owned);
    return absl::OkStatus();
  }

  bool deduplicate_ = true;
};

#define REGISTER_GPU(Key)                                     \
  REGISTER_KERNEL_BUILDER(Name("SlipstreamMaskGradients")     \
                              .Device(tensorflow::DEVICE_GPU) \
                              .HostMemory("handle")           \
                              .HostMemory("masked")           \
                              .HostMemory("offered")          \
                              .TypeConstraint<Key>("Tkeys"),  \
                          MaskGradientsGpuKernel<Key>)
REGISTER_GPU(int32_t);
REGISTER_GPU(int64_t);
#undef REGISTER_GPU

}  // namespace
}  // namespace slipstream
