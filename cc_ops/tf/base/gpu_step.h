// Shared parts of GPU kernels: the stream of the op, CUDA errors as statuses, and outputs with a
// number of rows that only the GPU computes.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_

// Define EIGEN_USE_GPU before including this or any TensorFlow header.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "tensorflow/core/common_runtime/device/device_event_mgr.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace slipstream {

// Returns a CUDA error as an Internal error that names the op. Clears the last error of the thread,
// which a later op would report otherwise. what: part of the message, for example "could not be
// launched".
inline absl::Status Checked(tensorflow::OpKernelContext* context, cudaError_t error,
                            const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return absl::InternalError(
      absl::StrCat(context->op_kernel().type_string(), " ", what, ": ", cudaGetErrorString(error)));
}

// Returns the stream on which the op must enqueue its work.
inline cudaStream_t StreamOf(tensorflow::OpKernelContext* context) {
  return context->eigen_device<Eigen::GpuDevice>().stream();
}

// Copies memory from or to the device and waits, so that the caller may free or reuse host memory.
// For kernels that do not run in every step.
inline absl::Status CopyAndWait(tensorflow::OpKernelContext* context, void* to, const void* from,
                                size_t bytes, cudaMemcpyKind kind, const char* what) {
  if (bytes == 0) return absl::OkStatus();
  const cudaStream_t stream = StreamOf(context);
  TF_RETURN_IF_ERROR(Checked(context, cudaMemcpyAsync(to, from, bytes, kind, stream), what));
  return Checked(context, cudaStreamSynchronize(stream), what);
}

// Allocates the workspace of a launcher. query: the result of the function that computed `bytes`.
inline absl::Status AllocateWorkspace(tensorflow::OpKernelContext* context, cudaError_t query,
                                      size_t bytes, tensorflow::Tensor* workspace) {
  TF_RETURN_IF_ERROR(Checked(context, query, "could not compute the size of its workspace"));
  return context->allocate_temp(tensorflow::DT_UINT8,
                                tensorflow::TensorShape({static_cast<int64_t>(bytes)}), workspace);
}

#ifndef SLIPSTREAM_EMULATED_GPU  // emulated_gpu.h defines the function then.
// Calls `then` in a thread of TensorFlow after all work that the stream of the op has now. The
// function must be short, because later functions of the device wait for it.
inline void AfterStream(tensorflow::OpKernelContext* context, std::function<void()> then) {
  context->device()->tensorflow_accelerator_device_info()->event_mgr->ThenExecute(
      context->op_device_context()->stream(), std::move(then));
}
#endif

// Base of kernels whose number of output rows is computed on the GPU. The kernel does not block a
// thread to wait for that number: it enqueues all work and a copy of the counts to pinned memory.
// After the copy a thread of TensorFlow slices the outputs, without a further launch.
//
// A derived class implements Enqueue, which creates an object of a class derived from Launch.
class CountedGpuKernel : public tensorflow::AsyncOpKernel {
 public:
  // The memory that the enqueued work uses. The kernel deletes it after the outputs were set.
  class Launch {
   public:
    virtual ~Launch() = default;

    tensorflow::Tensor workspace;               // uint8
    tensorflow::Tensor counts, counts_on_host;  // int64

    // Slices the outputs to the sizes in `counts_on_host`.
    virtual absl::Status SetOutputs(tensorflow::OpKernelContext* context) const = 0;
  };

  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) final {
    std::unique_ptr<Launch> launch;
    const absl::Status status = WithMemoryChecked(*this, [&] { return Enqueue(context, &launch); });
    if (!status.ok()) {
      context->SetStatus(status);
      done();
      return;
    }
    AfterStream(context, [context, done = std::move(done), released = launch.release()] {
      std::unique_ptr<Launch> launch(released);
      const absl::Status status = launch->SetOutputs(context);
      if (!status.ok()) context->SetStatus(status);
      launch.reset();  // `done` may end the step and delete the context
      done();
    });
  }

 protected:
  // Enqueues the work on the stream of the op, with CopyCounts last, and sets `launch`.
  virtual absl::Status Enqueue(tensorflow::OpKernelContext* context,
                               std::unique_ptr<Launch>* launch) = 0;

  // Allocates `counts` and `counts_on_host` of a launch, [n] each. The latter is pinned memory, so
  // that the copy is asynchronous.
  static absl::Status AllocateCounts(tensorflow::OpKernelContext* context, int64_t n,
                                     Launch* launch) {
    tensorflow::AllocatorAttributes pinned;
    pinned.set_on_host(true);
    pinned.set_gpu_compatible(true);
    const tensorflow::TensorShape shape({n});
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, shape, &launch->counts));
    return context->allocate_temp(tensorflow::DT_INT64, shape, &launch->counts_on_host, pinned);
  }

  // Enqueues the copy of the counts to the host.
  static absl::Status CopyCounts(tensorflow::OpKernelContext* context, Launch* launch) {
    return Checked(
        context,
        cudaMemcpyAsync(launch->counts_on_host.data(), launch->counts.data(),
                        launch->counts.TotalBytes(), cudaMemcpyDeviceToHost, StreamOf(context)),
        "could not copy its counts");
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_
