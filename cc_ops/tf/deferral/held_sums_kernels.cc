// CPU kernels of held sums: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/deferral/held_sums_kernels.h"

#include <limits>
#include <memory>

#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

struct CpuDevice {
  static constexpr int64_t kMaxPlaces = std::numeric_limits<int64_t>::max();

  static absl::Status ToHost(OpKernelContext* /*context*/, const Tensor& from, Tensor* to) {
    *to = from;
    return absl::OkStatus();
  }
  static absl::Status ToDevice(OpKernelContext* /*context*/, const Tensor& from, Tensor* to) {
    *to = from;
    return absl::OkStatus();
  }
};

class AddToHeldCpuKernel : public HeldSumsKernel {
 public:
  using HeldSumsKernel::HeldSumsKernel;

 private:
  absl::Status Run(OpKernelContext* context, HeldSumsResource* resource) override {
    const Tensor &keys = context->input(1), &gradients = context->input(2);
    TF_RETURN_IF_ERROR(CheckRows(keys, gradients, resource->dim));
    Tensor *places = nullptr, *sums = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, keys.shape(), &places));
    TF_RETURN_IF_ERROR(context->allocate_output(1, gradients.shape(), &sums));
    const HoldRule& rule = resource->rule;
    TF_RETURN_IF_ERROR(OutputScalar(context, 2, rule.by_movement && rule.MayHold()));
    return ToAbsl(AddToHeld(resource->buffers.View(resource->dim), keys.flat<int64_t>().data(),
                            gradients.flat<float>().data(), keys.NumElements(),
                            places->flat<int64_t>().data(), sums->flat<float>().data()));
  }
};

class TakeDueCpuKernel : public HeldSumsKernel {
 public:
  using HeldSumsKernel::HeldSumsKernel;

 private:
  absl::Status Run(OpKernelContext* context, HeldSumsResource* resource) override {
    tensorflow::core::RefCountPtr<KeySetResource> marked;
    TF_RETURN_IF_ERROR(FindKeySet(context, &marked, 1));
    TF_RETURN_IF_ERROR(CheckTaken(context, resource->dim));
    const std::shared_ptr<const KeySetContent> content = marked->content();
    const Tensor &keys = context->input(2), &places = context->input(3), &sums = context->input(4),
                 &may_wait = context->input(5);
    HoldRule rule = resource->rule;
    ++rule.step;
    const HeldSums held = resource->buffers.View(resource->dim);
    const int64_t n = keys.NumElements();
    DuePlan plan;
    LeavingRows leaving;
    HeldCounts counts;
    TF_RETURN_IF_ERROR(
        ToAbsl(FindDue(held, rule, keys.flat<int64_t>().data(), n, places.flat<int64_t>().data(),
                       sums.flat<float>().data(), may_wait.flat<bool>().data(),
                       content->keys.view(), &plan, &leaving, &counts)));
    // What leaves is held nowhere else once the sums have changed: outputs come first.
    TF_RETURN_IF_ERROR(Output(context, 0, TensorShape({counts.leaving}), leaving.keys));
    TF_RETURN_IF_ERROR(
        Output(context, 1, TensorShape({counts.leaving, resource->dim}), leaving.sums));
    TF_RETURN_IF_ERROR(OutputScalar(context, 2, resource->is_shadow && !rule.lets_go));
    TF_RETURN_IF_ERROR(OutputScalar(context, 3, rule.defers));
    KeepOthers(held, rule, keys.flat<int64_t>().data(), n, sums.flat<float>().data(), plan);
    resource->Add(counts);
    resource->rule.step = rule.step;
    resource->rule.lets_go = false;
    return absl::OkStatus();
  }
};

#define REGISTER_CPU(name, Kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), MemoryChecked<Kernel>)
REGISTER_CPU("SlipstreamHeldSums", CreateHeldSumsKernel);
REGISTER_CPU("SlipstreamHeldSumsConfigure", ConfigureHeldSumsKernel<CpuDevice>);
REGISTER_CPU("SlipstreamHeldSumsLetGo", LetGoHeldSumsKernel<CpuDevice>);
REGISTER_CPU("SlipstreamHeldSumsState", HeldSumsStateKernel);
REGISTER_CPU("SlipstreamHeldSumsExport", ExportHeldSumsKernel<CpuDevice>);
REGISTER_CPU("SlipstreamHeldSumsImport", ImportHeldSumsKernel<CpuDevice>);
REGISTER_CPU("SlipstreamAddToHeld", AddToHeldCpuKernel);
REGISTER_CPU("SlipstreamTakeDue", TakeDueCpuKernel);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
