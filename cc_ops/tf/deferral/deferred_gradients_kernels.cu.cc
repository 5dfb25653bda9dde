// GPU kernels of deferred gradients: launches on the op's own stream, no device code here.
#define EIGEN_USE_GPU
#include "cc_ops/tf/deferral/deferred_gradients_kernels.h"

#include <memory>
#include <utility>

#include "cc_ops/core/deferral/deferred_buffers.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Between steps: it waits for its copies.
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
        Checked(cudaMemcpyAsync(to->data(), from.data(), from.TotalBytes(), kind, stream),
                "deferred gradients could not be copied"));
    return Checked(cudaStreamSynchronize(stream), "deferred gradients could not be copied");
  }
};

absl::Status AllocateWorkspace(OpKernelContext* context, int64_t n, int64_t capacity,
                               Tensor* workspace) {
  if (n > kMaxDeferredRows - capacity) {
    return absl::InvalidArgumentError(absl::StrCat("there are ", n, " keys beside room for ",
                                                   capacity, " deferred gradients; allowed: up to ",
                                                   kMaxDeferredRows, " of both"));
  }
  size_t bytes = 0;
  TF_RETURN_IF_ERROR(Checked(DeferralWorkspaceBytes(n, capacity, &bytes),
                             "a step of deferred gradients could not size its workspace"));
  return context->allocate_temp(tensorflow::DT_UINT8, TensorShape({static_cast<int64_t>(bytes)}),
                                workspace);
}

DeviceWorkspace ViewOf(const Tensor& workspace) {
  return {workspace.data(), workspace.TotalBytes()};
}

absl::Status AddOnGpu(OpKernelContext* context, DeferredGradientsResource* resource) {
  const Tensor &keys = context->input(1), &gradients = context->input(2);
  TF_RETURN_IF_ERROR(CheckRows(keys, gradients, resource->dim));
  const int64_t n = keys.NumElements();
  Tensor *indices = nullptr, *sums = nullptr, workspace;
  TF_RETURN_IF_ERROR(context->allocate_output(0, keys.shape(), &indices));
  TF_RETURN_IF_ERROR(context->allocate_output(1, gradients.shape(), &sums));
  const DeferralRule& rule = resource->rule;
  TF_RETURN_IF_ERROR(OutputScalar(context, 2, rule.by_movement && rule.MayDefer()));
  const DeferredBuffers buffers = resource->tensors.View(resource->dim);
  // TensorFlow reuses this memory, and buffers that were replaced, in the order of this stream.
  TF_RETURN_IF_ERROR(AllocateWorkspace(context, n, buffers.capacity, &workspace));
  return Checked(LaunchAddDeferred(StreamOf(context), buffers, keys.flat<int64_t>().data(),
                                   gradients.flat<float>().data(), n, ViewOf(workspace),
                                   indices->flat<int64_t>().data(), sums->flat<float>().data()),
                 "SlipstreamAddDeferred could not be launched");
}

class TakeDueLaunch : public CountedGpuKernel::Launch {
 public:
  DeferredGradientsRef resource;
  DeferredTensors tensors;
  std::shared_ptr<const KeySetContent> saturated;
  Tensor workspace, due_keys, due_sums, counts, counts_on_host;
  bool is_shadow = false, defers = false;

 private:
  absl::Status SetOutputs(OpKernelContext* context) const override {
    const auto* counted = static_cast<const StepCounts*>(counts_on_host.data());
    {
      const std::lock_guard<std::mutex> lock(resource->mutex);
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
  absl::Status Enqueue(OpKernelContext* context, std::unique_ptr<Launch>* pending) override {
    auto owned = std::make_unique<TakeDueLaunch>();
    TakeDueLaunch* const launch = owned.get();
    TF_RETURN_IF_ERROR(FindDeferred(context, &launch->resource));
    DeferredGradientsResource* const resource = launch->resource.get();
    tensorflow::core::RefCountPtr<KeySetResource> saturated;
    TF_RETURN_IF_ERROR(FindKeySet(context, &saturated, 1));
    StepRows rows;
    TF_RETURN_IF_ERROR(ReadStep(context, resource->dim, &rows));
    launch->saturated = saturated->content();
    rows.saturated = ViewOnDevice(*launch->saturated);

    const std::lock_guard<std::mutex> lock(resource->mutex);
    launch->tensors = resource->tensors;
    const DeferredBuffers buffers = launch->tensors.View(resource->dim);
    DeferralRule rule = resource->rule;
    ++rule.step;
    launch->is_shadow = resource->is_shadow && !rule.flushes;
    launch->defers = rule.defers;
    const int64_t most = rows.n + buffers.capacity;
    TF_RETURN_IF_ERROR(AllocateWorkspace(context, rows.n, buffers.capacity, &launch->workspace));
    TensorShape due_rows;
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({most, resource->dim}, &due_rows));
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, TensorShape({most}), &launch->due_keys));
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, due_rows, &launch->due_sums));
    constexpr int64_t kCounts = sizeof(StepCounts) / sizeof(int64_t);
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, TensorShape({kCounts}), &launch->counts));
    TF_RETURN_IF_ERROR(AllocateOnHost(context, kCounts, &launch->counts_on_host));
    const cudaStream_t stream = StreamOf(context);
    TF_RETURN_IF_ERROR(Checked(LaunchTakeDue(stream, buffers, rule, rows, ViewOf(launch->workspace),
                                             launch->due_keys.flat<int64_t>().data(),
                                             launch->due_sums.flat<float>().data(),
                                             static_cast<StepCounts*>(launch->counts.data())),
                               "SlipstreamTakeDue could not be launched"));
    // From here on the buffers are those after the step.
    resource->rule.step = rule.step;
    resource->rule.flushes = false;
    TF_RETURN_IF_ERROR(Checked(cudaMemcpyAsync(launch->counts_on_host.data(), launch->counts.data(),
                                               sizeof(StepCounts), cudaMemcpyDeviceToHost, stream),
                               "SlipstreamTakeDue could not copy its counts"));
    *pending = std::move(owned);
    return absl::OkStatus();
  }
};

#define GPU(name) Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("handle")
REGISTER_KERNEL_BUILDER(GPU("SlipstreamDeferredGradients"), MemoryChecked<CreateDeferredKernel>);
REGISTER_KERNEL_BUILDER(GPU("SlipstreamDeferredGradientsConfigure")
                            .HostMemory("capacity")
                            .HostMemory("max_rows")
                            .HostMemory("max_age"),
                        MemoryChecked<ConfigureDeferredKernel<GpuDevice>>);
REGISTER_KERNEL_BUILDER(GPU("SlipstreamDeferredGradientsFlush"),
                        MemoryChecked<FlushDeferredKernel<GpuDevice>>);
REGISTER_KERNEL_BUILDER(GPU("SlipstreamDeferredGradientsState")
                            .HostMemory("counts")
                            .HostMemory("num_deferred")
                            .HostMemory("capacity")
                            .HostMemory("flushes"),
                        MemoryChecked<DeferredFunctionKernel<OutputState>>);
REGISTER_KERNEL_BUILDER(GPU("SlipstreamDeferredGradientsExport")
                            .HostMemory("keys")
                            .HostMemory("ages")
                            .HostMemory("sums"),
                        MemoryChecked<DeferredFunctionKernel<OutputDeferred<GpuDevice>>>);
REGISTER_KERNEL_BUILDER(GPU("SlipstreamDeferredGradientsImport")
                            .HostMemory("keys")
                            .HostMemory("ages")
                            .HostMemory("sums"),
                        MemoryChecked<DeferredFunctionKernel<InputDeferred<GpuDevice>>>);
REGISTER_KERNEL_BUILDER(GPU("SlipstreamAddDeferred").HostMemory("by_movement"),
                        MemoryChecked<DeferredFunctionKernel<AddOnGpu>>);
REGISTER_KERNEL_BUILDER(
    GPU("SlipstreamTakeDue").HostMemory("saturated").HostMemory("is_shadow").HostMemory("defers"),
    TakeDueGpuKernel);
#undef GPU

}  // namespace
}  // namespace slipstream
