// CPU kernels of key maps: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/containers/key_map_kernels.h"

#include "cc_ops/core/containers/key_probe.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class ProbeFrozenCpuKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<const KeyMapContent> frozen;
    OP_REQUIRES_OK(context, ReadKeyMap(context, &frozen));
    const Tensor& keys = context->input(1);
    const int64_t n = keys.NumElements();
    Tensor *places = nullptr, *hits = nullptr, *misses = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, keys.shape(), &places));
    const int64_t num_hits = ProbeFrozen(keys.flat<int64_t>().data(), n, frozen->keys.view(),
                                         ParallelOf(context), places->flat<int64_t>().data());
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({num_hits}), &hits));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({n - num_hits}), &misses));
    SplitProbed(places->flat<int64_t>().data(), n, hits->flat<int64_t>().data(),
                misses->flat<int64_t>().data());
  }
};

class LookUpStatesCpuKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<const KeyMapContent> known;
    OP_REQUIRES_OK(context, ReadKeyMap(context, &known));
    const Tensor& keys = context->input(1);
    Tensor* states = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, keys.shape(), &states));
    LookUpStates(keys.flat<int64_t>().data(), keys.NumElements(), known->keys.view(),
                 ParallelOf(context), states->flat<uint8_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("SlipstreamKeyMap").Device(tensorflow::DEVICE_CPU),
                        MemoryChecked<CreateResourceKernel<KeyMapResource>>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamKeyMapAssign").Device(tensorflow::DEVICE_CPU),
                        MemoryChecked<AssignKeyMapKernel>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamProbeFrozen").Device(tensorflow::DEVICE_CPU),
                        MemoryChecked<ProbeFrozenCpuKernel>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamLookUpStates").Device(tensorflow::DEVICE_CPU),
                        MemoryChecked<LookUpStatesCpuKernel>);

}  // namespace
}  // namespace slipstream
