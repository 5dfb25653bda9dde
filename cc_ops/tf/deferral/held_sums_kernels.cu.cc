// GPU kernels of held sums: launches on the op's own stream, no device code here.
#define EIGEN_USE_GPU
#include "cc_ops/tf/deferral/held_sums_kernels.h"

#include <memory>
#include <utility>

#include "cc_ops/core/deferral/held_sums.cu.h"
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
  static constexpr int64_t kMaxPlaces = kMaxHeldRows;

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
                "held sums could not be copied"));
    return Checked(cudaStreamSynchronize(stream), "held sums could not be copied");
  }
};

absl::Status CheckNumber(int64_t n, int64_t capacity) {
  if (n <= kMaxHeldRows - capacity) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("there are ", n, " keys beside room for ",
                                                 capacity, " sums; allowed: up to ", kMaxHeldRows,
                                                 " of both"));
}

absl::Status AllocateWorkspace(OpKernelContext* context, int64_t n, int64_t capacity,
                               Tensor* workspace) {
  size_t bytes = 0;
  TF_RETURN_IF_ERROR(CheckNumber(n, capacity));
  TF_RETURN_IF_ERROR(Checked(HeldSumsWorkspaceBytes(n, capacity, &bytes),
                             "a step of held sums could not ask for its workspace"));
  return context->allocate_temp(tensorflow::DT_UINT8, TensorShape({static_cast<int64_t>(bytes)}),
                                workspace);
}

class AddToHeldGpuKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    HeldSumsRef resource;
    OP_REQUIRES_OK(context, FindHeldSums(context, &resource));
    const Tensor &keys = context->input(1), &gradients = context->input(2);
    OP_REQUIRES_OK(context, CheckRows(keys, gradients, resource->dim));
    const int64_t n = keys.NumElements();
    Tensor *places = nullptr, *sums = nullptr, workspace;
    OP_REQUIRES_OK(context, context->allocate_output(0, keys.shape(), &places));
    OP_REQUIRES_OK(context, context->allocate_output(1, gradients.shape(), &sums));
    const std::lock_guard<std::mutex> lock(resource->mutex);
    const HoldRule& rule = resource->rule;
    OP_REQUIRES_OK(context, OutputScalar(context, 2, rule.by_movement && rule.MayHold()));
    const HeldSums held = resource->buffers.View(resource->dim);
    // TensorFlow reuses this memory, and buffers that were replaced, in the order of this stream.
    OP_REQUIRES_OK(context, AllocateWorkspace(context, n, held.capacity, &workspace));
    OP_REQUIRES_OK(context,
                   Checked(LaunchAddToHeld(StreamOf(context), held, keys.flat<int64_t>().data(),
                                           gradients.flat<float>().data(), n, workspace.data(),
                                           workspace.TotalBytes(), places->flat<int64_t>().data(),
                                           sums->flat<float>().data()),
                           "SlipstreamAddToHeld could not be launched"));
  }
};

class TakeDueLaunch : public CountedGpuKernel::Launch {
 public:
  HeldSumsRef resource;
  HeldBuffers buffers;
  std::shared_ptr<const KeySetContent> marked;
  Tensor workspace, due_keys, due_sums, counts, counts_on_host;
  bool is_shadow = false, defers = false;

 private:
  absl::Status SetOutputs(OpKernelContext* context) const override {
    const auto* counted = static_cast<const HeldCounts*>(counts_on_host.data());
    {
      const std::lock_guard<std::mutex> lock(resource->mutex);
      resource->Add(*counted);
    }
    // The first rows of the full-size buffers, which are freed with these outputs.
    context->set_output(0, due_keys.Slice(0, counted->leaving));
    context->set_output(1, due_sums.Slice(0, counted->leaving));
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
    TF_RETURN_IF_ERROR(FindHeldSums(context, &launch->resource));
    HeldSumsResource* const resource = launch->resource.get();
    tensorflow::core::RefCountPtr<KeySetResource> marked;
    TF_RETURN_IF_ERROR(FindKeySet(context, &marked, 1));
    TF_RETURN_IF_ERROR(CheckTaken(context, resource->dim));
    launch->marked = marked->content();
    const Tensor& keys = context->input(2);
    const int64_t n = keys.NumElements();

    const std::lock_guard<std::mutex> lock(resource->mutex);
    launch->buffers = resource->buffers;
    const HeldSums held = launch->buffers.View(resource->dim);
    HoldRule rule = resource->rule;
    ++rule.step;
    launch->is_shadow = resource->is_shadow && !rule.lets_go;
    launch->defers = rule.defers;
    TF_RETURN_IF_ERROR(AllocateWorkspace(context, n, held.capacity, &launch->workspace));
    TensorShape rows;
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({n + held.capacity, resource->dim}, &rows));
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64,
                                              TensorShape({n + held.capacity}), &launch->due_keys));
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, rows, &launch->due_sums));
    constexpr int64_t kCounts = sizeof(HeldCounts) / sizeof(int64_t);
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, TensorShape({kCounts}), &launch->counts));
    TF_RETURN_IF_ERROR(AllocateOnHost(context, kCounts, &launch->counts_on_host));
    const cudaStream_t stream = StreamOf(context);
    TF_RETURN_IF_ERROR(Checked(
        LaunchTakeDue(stream, held, rule, keys.flat<int64_t>().data(), n,
                      context->input(3).flat<int64_t>().data(),
                      context->input(4).flat<float>().data(), context->input(5).flat<bool>().data(),
                      ViewOnDevice(*launch->marked), launch->workspace.data(),
                      launch->workspace.TotalBytes(), launch->due_keys.flat<int64_t>().data(),
                      launch->due_sums.flat<float>().data(),
                      static_cast<HeldCounts*>(launch->counts.data())),
        "SlipstreamTakeDue could not be launched"));
    // From here on the buffers are those after the step.
    resource->rule.step = rule.step;
    resource->rule.lets_go = false;
    TF_RETURN_IF_ERROR(Checked(cudaMemcpyAsync(launch->counts_on_host.data(), launch->counts.data(),
                                               sizeof(HeldCounts), cudaMemcpyDeviceToHost, stream),
                               "SlipstreamTakeDue could not copy its counts"));
    *pending = std::move(owned);
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(
    Name("SlipstreamHeldSums").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
    MemoryChecked<CreateHeldSumsKernel>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamHeldSumsConfigure")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("capacity")
                            .HostMemory("max_rows")
                            .HostMemory("max_age"),
                        MemoryChecked<ConfigureHeldSumsKernel<GpuDevice>>);
REGISTER_KERNEL_BUILDER(
    Name("SlipstreamHeldSumsLetGo").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
    MemoryChecked<LetGoHeldSumsKernel<GpuDevice>>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamHeldSumsState")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("counts")
                            .HostMemory("pending")
                            .HostMemory("capacity")
                            .HostMemory("lets_go"),
                        MemoryChecked<HeldSumsStateKernel>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamHeldSumsExport")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("keys")
                            .HostMemory("ages")
                            .HostMemory("sums"),
                        MemoryChecked<ExportHeldSumsKernel<GpuDevice>>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamHeldSumsImport")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("keys")
                            .HostMemory("ages")
                            .HostMemory("sums"),
                        MemoryChecked<ImportHeldSumsKernel<GpuDevice>>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamAddToHeld")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("by_movement"),
                        MemoryChecked<AddToHeldGpuKernel>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamTakeDue")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("marked")
                            .HostMemory("is_shadow")
                            .HostMemory("defers"),
                        TakeDueGpuKernel);

}  // namespace
}  // namespace slipstream
