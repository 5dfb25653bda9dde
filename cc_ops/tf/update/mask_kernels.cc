// CPU kernels of gradient masking: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/update/mask_kernels.h"

#include "cc_ops/core/update/row_compaction.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <class Key>
class MaskGradientsCpuKernel : public OpKernel {
 public:
  explicit MaskGradientsCpuKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("deduplicate", &deduplicate_));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<const KeySetContent> masked;
    OP_REQUIRES_OK(context, FindContent(context, 0, &masked));
    const Tensor &keys = context->input(1), &gradients = context->input(2);
    OP_REQUIRES_OK(context, CheckGradients(keys, gradients));
    const Parallel parallel = ParallelOf(context);
    const int64_t n = keys.NumElements();
    if (RowCompaction::KeepsAll(keys.flat<Key>().data(), n, masked->table.view(), deduplicate_)) {
      context->set_output(0, keys);
      context->set_output(1, gradients);
      OP_REQUIRES_OK(context, OutputScalar(context, 2, int64_t{0}));
      OP_REQUIRES_OK(context, OutputScalar(context, 3, n));
      return;
    }
    RowCompaction compaction;
    compaction.Plan(keys.flat<Key>().data(), n, masked->table.view(), deduplicate_, parallel);
    TensorShape kept_shape = gradients.shape();
    kept_shape.set_dim(0, compaction.kept());
    Key* kept_keys = nullptr;
    float* kept_gradients = nullptr;
    OP_REQUIRES_OK(context, Allocate(context, 0, TensorShape({compaction.kept()}), &kept_keys));
    OP_REQUIRES_OK(context, Allocate(context, 1, kept_shape, &kept_gradients));
    const int64_t offered = compaction.offered();
    OP_REQUIRES_OK(context, OutputScalar(context, 2, offered - compaction.kept()));
    OP_REQUIRES_OK(context, OutputScalar(context, 3, offered));
    compaction.Write(keys.flat<Key>().data(), gradients.flat<float>().data(), RowSize(gradients),
                     parallel, kept_keys, kept_gradients);
  }

 private:
  bool deduplicate_ = true;
};

REGISTER_KERNEL_BUILDER(
    Name("SlipstreamMaskGradients").Device(tensorflow::DEVICE_CPU).TypeConstraint<int32_t>("Tkeys"),
    MemoryChecked<MaskGradientsCpuKernel<int32_t>>);
REGISTER_KERNEL_BUILDER(
    Name("SlipstreamMaskGradients").Device(tensorflow::DEVICE_CPU).TypeConstraint<int64_t>("Tkeys"),
    MemoryChecked<MaskGradientsCpuKernel<int64_t>>);

}  // namespace
}  // namespace slipstream
