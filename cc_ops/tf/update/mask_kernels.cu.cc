// GPU kernels of gradient masking: they launch functions of cc_ops/core on the stream of the
// op.
#define EIGEN_USE_GPU
#include "cc_ops/tf/update/mask_kernels.h"

#include "cc_ops/core/update/row_compaction.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/containers/table_on_gpu.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class MaskLaunch : public CountedGpuKernel::Launch {
 public:
  std::shared_ptr<const KeySetContent> masked;
  Tensor kept_keys, kept_gradients;

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
  absl::Status Enqueue(OpKernelContext* context, std::unique_ptr<Launch>* launched) override {
    auto owned = std::make_unique<MaskLaunch>();
    MaskLaunch* const launch = owned.get();
    TF_RETURN_IF_ERROR(FindContent(context, 0, &launch->masked));
    const Tensor &keys = context->input(1), &gradients = context->input(2);
    TF_RETURN_IF_ERROR(CheckGradients(keys, gradients));
    const int64_t n = keys.NumElements();
    if (n > kMaxCompactedRows) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradients has ", n, " rows; expected at most ", kMaxCompactedRows));
    }
    size_t workspace_bytes = 0;
    const cudaError_t query =
        CompactRowsWorkspaceBytes<Key>(n, RowSize(gradients), deduplicate_, &workspace_bytes);
    TF_RETURN_IF_ERROR(AllocateWorkspace(context, query, workspace_bytes, &launch->workspace));
    TF_RETURN_IF_ERROR(context->allocate_temp(keys.dtype(), keys.shape(), &launch->kept_keys));
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_FLOAT, gradients.shape(), &launch->kept_gradients));
    TF_RETURN_IF_ERROR(AllocateCounts(context, sizeof(CompactionCounts) / sizeof(int64_t), launch));
    const CompactionInput<Key> input = {
        keys.flat<Key>().data(), gradients.flat<float>().data(), n,
        RowSize(gradients),      ViewOnGpu(*launch->masked),     deduplicate_};
    TF_RETURN_IF_ERROR(Checked(
        context,
        LaunchCompactRows(StreamOf(context), input, {launch->workspace.data(), workspace_bytes},
                          launch->kept_keys.flat<Key>().data(),
                          launch->kept_gradients.flat<float>().data(),
                          static_cast<CompactionCounts*>(launch->counts.data())),
        "could not be launched"));
    TF_RETURN_IF_ERROR(CopyCounts(context, launch));
    *launched = std::move(owned);
    return absl::OkStatus();
  }

  bool deduplicate_ = true;
};

#define REGISTER_GPU(Key)                                              \
  REGISTER_KERNEL_BUILDER(SLIPSTREAM_ON_GPU("SlipstreamMaskGradients") \
                              .HostMemory("masked")                    \
                              .HostMemory("offered")                   \
                              .TypeConstraint<Key>("Tkeys"),           \
                          MaskGradientsGpuKernel<Key>)
REGISTER_GPU(int32_t);
REGISTER_GPU(int64_t);
#undef REGISTER_GPU

}  // namespace
}  // namespace slipstream
