// CPU kernels of deferred gradients: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/deferral/deferred_gradients_kernels.h"

#include <limits>
#include <memory>

#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

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
  const DeferredLock lock(resource->mutex);
  AddedRows rows;
  TF_RETURN_IF_ERROR(rows.Read(context, *resource));
  return ToAbsl(AddDeferred(resource->tensors.View(resource->dim), rows.keys, rows.gradients,
                            rows.n, rows.indices, rows.sums));
}

absl::Status TakeDueOnCpu(OpKernelContext* context, DeferredGradientsResource* resource) {
  const DeferredLock lock(resource->mutex);
  std::shared_ptr<const KeySetContent> saturated;
  StepRows rows;
  TF_RETURN_IF_ERROR(FindContent(context, 1, &saturated, "saturated: []"));
  TF_RETURN_IF_ERROR(ReadStep(context, resource->dim, &rows));
  rows.saturated = saturated->table.view();
  DeferralRule rule = resource->rule;
  ++rule.step;
  const DeferredBuffers buffers = resource->tensors.View(resource->dim);
  StepPlan plan;
  TF_RETURN_IF_ERROR(ToAbsl(FindDue(buffers, rule, rows, &plan)));
  // The outputs are allocated first, because after the change of the buffers the due sums are
  // stored nowhere else.
  TF_RETURN_IF_ERROR(Output(context, 0, plan.due_keys));
  TF_RETURN_IF_ERROR(
      Output(context, 1, TensorShape({plan.counts.sent, resource->dim}), plan.due_sums));
  TF_RETURN_IF_ERROR(OutputScalar(context, 2, resource->is_shadow && !rule.flushes));
  TF_RETURN_IF_ERROR(OutputScalar(context, 3, rule.defers));
  KeepOthers(buffers, rule, rows, plan);
  resource->counts.Add(plan.counts);
  resource->counts.num_deferred = plan.counts.num_deferred;
  resource->rule.step = rule.step;
  resource->rule.flushes = false;
  return absl::OkStatus();
}

SLIPSTREAM_CPU_KERNEL("SlipstreamDeferredGradients", CreateDeferredKernel);
SLIPSTREAM_CPU_KERNEL("SlipstreamDeferredGradientsConfigure",
                      ResourceKernel<ConfigureDeferred<CpuDevice>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamDeferredGradientsFlush", ResourceKernel<FlushDeferred<CpuDevice>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamDeferredGradientsState", ResourceKernel<OutputState>);
SLIPSTREAM_CPU_KERNEL("SlipstreamDeferredGradientsExport",
                      ResourceKernel<ExportDeferred<CpuDevice>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamDeferredGradientsImport",
                      ResourceKernel<ImportDeferred<CpuDevice>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamAddDeferred", ResourceKernel<AddOnCpu>);
SLIPSTREAM_CPU_KERNEL("SlipstreamTakeDue", ResourceKernel<TakeDueOnCpu>);

}  // namespace
}  // namespace slipstream
