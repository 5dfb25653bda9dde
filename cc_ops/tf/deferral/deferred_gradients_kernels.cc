// CPU kernels of deferred gradients: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/deferral/deferred_gradients_kernels.h"

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
  static constexpr int64_t kMaxCapacity = std::numeric_limits<int64_t>::max();

  static absl::Status ToHost(OpKernelContext* /*context*/, const Tensor& from, Tensor* to) {
    *to = from;
    return absl::OkStatus();
  }
  static absl::Status ToDevice(OpKernelContext* /*context*/, const Tensor& from, Tensor* to) {
    *to = from;
    return absl::OkStatus();
  }
};

absl::Status AddOnCpu(OpKernelContext* context, DeferredGradientsResource* resource) {
  const Tensor &keys = context->input(1), &gradients = context->input(2);
  TF_RETURN_IF_ERROR(CheckRows(keys, gradients, resource->dim));
  Tensor *indices = nullptr, *sums = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, keys.shape(), &indices));
  TF_RETURN_IF_ERROR(context->allocate_output(1, gradients.shape(), &sums));
  const DeferralRule& rule = resource->rule;
  TF_RETURN_IF_ERROR(OutputScalar(context, 2, rule.by_movement && rule.MayDefer()));
  return ToAbsl(AddDeferred(resource->tensors.View(resource->dim), keys.flat<int64_t>().data(),
                            gradients.flat<float>().data(), keys.NumElements(),
                            indices->flat<int64_t>().data(), sums->flat<float>().data()));
}

absl::Status TakeDueOnCpu(OpKernelContext* context, DeferredGradientsResource* resource) {
  tensorflow::core::RefCountPtr<KeySetResource> saturated;
  TF_RETURN_IF_ERROR(FindKeySet(context, &saturated, 1));
  StepRows rows;
  TF_RETURN_IF_ERROR(ReadStep(context, resource->dim, &rows));
  const std::shared_ptr<const KeySetContent> content = saturated->content();
  rows.saturated = content->keys.view();
  DeferralRule rule = resource->rule;
  ++rule.step;
  const DeferredBuffers buffers = resource->tensors.View(resource->dim);
  StepPlan plan;
  TF_RETURN_IF_ERROR(ToAbsl(FindDue(buffers, rule, rows, &plan)));
  // What is due is nowhere else once the buffers have changed: outputs come first.
  const int64_t due = plan.counts.sent;
  TF_RETURN_IF_ERROR(Output(context, 0, TensorShape({due}), plan.due_keys));
  TF_RETURN_IF_ERROR(Output(context, 1, TensorShape({due, resource->dim}), plan.due_sums));
  TF_RETURN_IF_ERROR(OutputScalar(context, 2, resource->is_shadow && !rule.flushes));
  TF_RETURN_IF_ERROR(OutputScalar(context, 3, rule.defers));
  KeepOthers(buffers, rule, rows, plan);
  resource->Add(plan.counts);
  resource->rule.step = rule.step;
  resource->rule.flushes = false;
  return absl::OkStatus();
}

#define REGISTER_CPU(name, Kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), MemoryChecked<Kernel>)
REGISTER_CPU("SlipstreamDeferredGradients", CreateDeferredKernel);
REGISTER_CPU("SlipstreamDeferredGradientsConfigure", ConfigureDeferredKernel<CpuDevice>);
REGISTER_CPU("SlipstreamDeferredGradientsFlush", FlushDeferredKernel<CpuDevice>);
REGISTER_CPU("SlipstreamDeferredGradientsState", DeferredFunctionKernel<OutputState>);
REGISTER_CPU("SlipstreamDeferredGradientsExport",
             DeferredFunctionKernel<OutputDeferred<CpuDevice>>);
REGISTER_CPU("SlipstreamDeferredGradientsImport", DeferredFunctionKernel<InputDeferred<CpuDevice>>);
REGISTER_CPU("SlipstreamAddDeferred", DeferredFunctionKernel<AddOnCpu>);
REGISTER_CPU("SlipstreamTakeDue", DeferredFunctionKernel<TakeDueOnCpu>);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
