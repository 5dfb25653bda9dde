// GPU kernels of deferred gradients: they launch functions of cc_ops/core on the stream of the op.
#define EIGEN_USE_GPU
#include "cc_ops/tf/deferral/deferred_gradients_kernels.h"

#include <memory>
#include <utility>

#include "cc_ops/core/deferral/deferred_buffers.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/containers/table_on_gpu.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Used between steps. It waits for its copies.
struct GpuDevice {
  static constexpr int64_t kMaxCapacity = kMaxDeferredRows;

  static absl::Status ToHost(OpKernelContext* context, const Tensor& from, Tensor* to) {
    tensorflow::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    TF_RETURN_IF_ERROR(context->allocate_temp(from.dtype(), from.shape(), to, on_host));
    return Copy(context, from, cudaMemcpyDeviceToHost, to);
  }
  static absl::Status ToDevice(OpKernelContext* context, const Tensor& from, Tensor* to) {
    TF_RETURN_IF_ERROR(context->allocate_temp(from.dtype(), from.shape(), to));
    return Copy(context, from, cudaMemcpyHostToDevice, to);
  }

 private:
  static absl::Status Copy(OpKernelContext* context, const Tensor& from, cudaMemcpyKind kind,
                           Tensor* to) {
    if (from.NumElements() == 0) return absl::OkStatus();
    const cudaStream_t stream = StreamOf(context);
    TF_RETURN_IF_ERROR(
        Checked(context, cudaMemcpyAsync(to->data(), from.data(), from.TotalBytes(), kind, stream),
                "could not copy deferred gradients"));
    return Checked(context, cudaStreamSynchronize(stream), "could not copy deferred gradients");
  }
};

absl::Status AllocateStep(OpKernelContext* context, int64_t n, int64_t capacity,
                          Tensor* workspace) {
  if (n > kMaxDeferredRows - capacity) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step has ", n, " keys and the buffers have capacity ", capacity,
                     "; expected at most ", kMaxDeferredRows, " in total"));
  }
  size_t bytes = 0;
  TF_RETURN_IF_ERROR(Checked(context, DeferralWorkspaceBytes(n, capacity, &bytes),
                             "could not compute the size of its workspace"));
  return context->allocate_temp(tensorflow::DT_UINT8, TensorShape({static_cast<int64_t>(bytes)}),
                                workspace);
}

DeviceWorkspace ViewOf(const Tensor& workspace) {
  return {workspace.data(), workspace.TotalBytes()};
}

absl::Status AddOnGpu(OpKernelContext* context, DeferredGradientsResource* resource) {
  const DeferredLock lock(resource->mutex);
  AddedRows rows;
  TF_RETURN_IF_ERROR(rows.Read(context, *resource));
  const DeferredBuffers buffers = resource->tensors.View(resource->dim);
  // TensorFlow reuses this memory, and buffers that were replaced, in the order of this stream.
  Tensor workspace;
  TF_RETURN_IF_ERROR(AllocateStep(context, rows.n, buffers.capacity, &workspace));
  return Checked(context,
                 LaunchAddDeferred(StreamOf(context), buffers, rows.keys, rows.gradients, rows.n,
                                   ViewOf(workspace), rows.indices, rows.sums),
                 "could not be launched");
}

class TakeDueLaunch : public CountedGpuKernel::Launch {
 public:
  DeferredGradientsRef resource;
  DeferredTensors tensors;
  std::shared_ptr<const KeySetContent> saturated;
  Tensor due_keys, due_sums;
  bool is_shadow = false, defers = false;

 private:
  absl::Status SetOutputs(OpKernelContext* context) const override {
    const auto* counted = static_cast<const StepCounts*>(counts_on_host.data());
    {
      const DeferredLock lock(resource->mutex);
      resource->Add(*counted);
    }
    // The first rows of the full-size buffers, which are freed with these outputs.
    context->set_output(0, due_keys.Slice(0, counted->sent));
    context->set_output(1, due_sums.Slice(0, counted->sent));
    TF_RETURN_IF_ERROR(OutputScalar(context, 2, is_shadow));
    return OutputScalar(context, 3, defers);
  }
};

class TakeDueGpuKernel : public CountedGpuKernel {
 public:
  using CountedGpuKernel::CountedGpuKernel;

 private:
  absl::Status Enqueue(OpKernelContext* context, std::unique_ptr<Launch>* launched) override {
    auto owned = std::make_unique<TakeDueLaunch>();
    TakeDueLaunch* const launch = owned.get();
    TF_RETURN_IF_ERROR(FindResource(context, 0, &launch->resource));
    DeferredGradientsResource* const resource = launch->resource.get();
    TF_RETURN_IF_ERROR(FindContent(context, 1, &launch->saturated, "saturated: []"));
    StepRows rows;
    TF_RETURN_IF_ERROR(ReadStep(context, resource->dim, &rows));
    rows.saturated = ViewOnGpu(*launch->saturated);

    const DeferredLock lock(resource->mutex);
    launch->tensors = resource->tensors;
    const DeferredBuffers buffers = launch->tensors.View(resource->dim);
    DeferralRule rule = resource->rule;
    ++rule.step;
    launch->is_shadow = resource->is_shadow && !rule.flushes;
    launch->defers = rule.defers;
    const int64_t maximum = rows.n + buffers.capacity;
    TF_RETURN_IF_ERROR(AllocateStep(context, rows.n, buffers.capacity, &launch->workspace));
    TensorShape due_rows;
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({maximum, resource->dim}, &due_rows));
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, TensorShape({maximum}), &launch->due_keys));
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, due_rows, &launch->due_sums));
    TF_RETURN_IF_ERROR(AllocateCounts(context, sizeof(StepCounts) / sizeof(int64_t), launch));
    TF_RETURN_IF_ERROR(
        Checked(context,
                LaunchTakeDue(StreamOf(context), buffers, rule, rows, ViewOf(launch->workspace),
                              launch->due_keys.flat<int64_t>().data(),
                              launch->due_sums.flat<float>().data(),
                              static_cast<StepCounts*>(launch->counts.data())),
                "could not be launched"));
    // The buffers now hold the state after the step.
    resource->rule.step = rule.step;
    resource->rule.flushes = false;
    TF_RETURN_IF_ERROR(CopyCounts(context, launch));
    *launched = std::move(owned);
    return absl::OkStatus();
  }
};

#define HOST_CONTENTS .HostMemory("keys").HostMemory("ages").HostMemory("sums")
SLIPSTREAM_GPU_KERNEL("SlipstreamDeferredGradients", , CreateDeferredKernel);
SLIPSTREAM_GPU_KERNEL("SlipstreamDeferredGradientsConfigure",
                      .HostMemory("capacity").HostMemory("max_rows").HostMemory("max_age"),
                      ResourceKernel<ConfigureDeferred<GpuDevice>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamDeferredGradientsFlush", ,
                      ResourceKernel<FlushDeferred<GpuDevice>>);
SLIPSTREAM_GPU_KERNEL(
    "SlipstreamDeferredGradientsState",
    .HostMemory("counts").HostMemory("num_deferred").HostMemory("capacity").HostMemory("flushes"),
    ResourceKernel<OutputState>);
SLIPSTREAM_GPU_KERNEL("SlipstreamDeferredGradientsExport", HOST_CONTENTS,
                      ResourceKernel<ExportDeferred<GpuDevice>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamDeferredGradientsImport", HOST_CONTENTS,
                      ResourceKernel<ImportDeferred<GpuDevice>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamAddDeferred", .HostMemory("by_movement"),
                      ResourceKernel<AddOnGpu>);
REGISTER_KERNEL_BUILDER(SLIPSTREAM_ON_GPU("SlipstreamTakeDue")
                            .HostMemory("saturated")
                            .HostMemory("is_shadow")
                            .HostMemory("defers"),
                        TakeDueGpuKernel);
#undef HOST_CONTENTS

}  // namespace
}  // namespace slipstream
