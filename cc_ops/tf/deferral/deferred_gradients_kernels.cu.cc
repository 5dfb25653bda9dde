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
    return CopyAndWait(context, to->data(), from.data(), from.TotalBytes(), kind,
                       "could not copy deferred gradients");
  }
};

// Checks the number of rows of a launch.
absl::Status CheckSize(int64_t n, int64_t capacity) {
  if (n <= kMaxDeferredRows - capacity) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the step has ", n, " keys and due rows, and the buffers have capacity ",
                   capacity, "; expected at most ", kMaxDeferredRows, " in total"));
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
  TF_RETURN_IF_ERROR(CheckSize(rows.n, buffers.capacity));
  size_t bytes = 0;
  const cudaError_t query = AddDeferredWorkspaceBytes(rows.n, &bytes);
  TF_RETURN_IF_ERROR(AllocateWorkspace(context, query, bytes, &workspace));
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
  DeferralRule rule;
  int64_t n = 0;
  bool is_shadow = false;

 private:
  absl::Status SetOutputs(OpKernelContext* context) const override {
    const auto* counted = static_cast<const DeviceStepCounts*>(counts_on_host.data());
    const int64_t invalid = counted->invalid_row;
    {
      const DeferredLock lock(resource->mutex);
      resource->bound.Finish(rule, n, invalid == 0 ? counted : nullptr);
      if (invalid == 0) {
        resource->counts.Add(*counted);
        resource->counts.num_deferred = resource->bound.num_deferred();
      } else {
        // The buffers are unchanged, therefore the next step takes the place of this one.
        resource->rule.step -= resource->rule.step == rule.step;
        resource->rule.flushes |= rule.flushes;
      }
    }
    if (invalid != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "keys[", invalid - 1, "] occurs twice, or the entry at indices[", invalid - 1,
          "] does not contain this key; expected distinct keys and the indices that "
          "SlipstreamAddDeferred returned in this step. Sum the gradients of each key first"));
    }
    // The first rows of the full-size buffers, which are freed with these outputs.
    context->set_output(0, due_keys.Slice(0, counted->sent));
    context->set_output(1, due_sums.Slice(0, counted->sent));
    TF_RETURN_IF_ERROR(OutputScalar(context, 2, is_shadow));
    return OutputScalar(context, 3, rule.defers);
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
    launch->rule = rule;
    launch->n = rows.n;
    const int64_t max_due = resource->bound.MaxDue(rule, rows.n, buffers.capacity);
    TF_RETURN_IF_ERROR(CheckSize(max_due, buffers.capacity));
    size_t bytes = 0;
    const cudaError_t query = TakeDueWorkspaceBytes(rows.n, max_due, &bytes);
    TF_RETURN_IF_ERROR(AllocateWorkspace(context, query, bytes, &launch->workspace));
    TensorShape due_rows;
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({max_due, resource->dim}, &due_rows));
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, TensorShape({max_due}), &launch->due_keys));
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, due_rows, &launch->due_sums));
    TF_RETURN_IF_ERROR(AllocateCounts(context, sizeof(DeviceStepCounts) / sizeof(int64_t), launch));
    TF_RETURN_IF_ERROR(
        Checked(context,
                LaunchTakeDue(StreamOf(context), buffers, rule, rows, max_due,
                              ViewOf(launch->workspace), launch->due_keys.flat<int64_t>().data(),
                              launch->due_sums.flat<float>().data(),
                              static_cast<DeviceStepCounts*>(launch->counts.data())),
                "could not be launched"));
    TF_RETURN_IF_ERROR(CopyCounts(context, launch));
    // The buffers now hold the state after the step.
    resource->bound.Launch(rows.n);
    resource->rule.step = rule.step;
    resource->rule.flushes = false;
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
