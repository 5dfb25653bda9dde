// What GPU kernels share: the op's stream, CUDA's errors as statuses, and outputs whose number of
// rows the GPU is the first to know.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_

// EIGEN_USE_GPU must be defined before this or any header of TensorFlow is included.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace slipstream {

// what: what the op could not do.
inline absl::Status Checked(tensorflow::OpKernelContext* context, cudaError_t error,
                            const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(context->op_kernel().type_string(), " ", what, ": ", cudaGetErrorString(error)));
}

inline cudaStream_t StreamOf(tensorflow::OpKernelContext* context) {
  return context->eigen_device<Eigen::GpuDevice>().stream();
}

// The number of rows of an output is known to the GPU first. The kernel does not block a thread to
// wait for it: everything is enqueued, the counts are copied to pinned memory, and a callback of
// the stream lets another thread cut the outputs to size, without a further launch.
class CountedGpuKernel : public tensorflow::AsyncOpKernel {
 public:
  // What must live until the stream has passed.
  class Launch {
   public:
    virtual ~Launch() = default;

    tensorflow::Tensor workspace;               // uint8
    tensorflow::Tensor counts, counts_on_host;  // int64

   protected:
    // Cuts the outputs to the sizes that have arrived in `counts_on_host`.
    virtual absl::Status SetOutputs(tensorflow::OpKernelContext* context) const = 0;

   private:
    friend class CountedGpuKernel;
    tensorflow::OpKernelContext* context_ = nullptr;
    DoneCallback done_;
    cudaError_t error_ = cudaSuccess;
  };

  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) final {
    std::unique_ptr<Launch> launch;
    absl::Status status;
    // What MemoryChecked is to kernels that are not asynchronous.
    try {
      status = Enqueue(context, &launch);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError(
          absl::StrCat("out of memory in ", type_string(), " '", name(), "'"));
    }
    if (!status.ok()) {
      context->SetStatus(status);
      done();
      return;
    }
    launch->context_ = context;
    launch->done_ = std::move(done);
    Launch* const released = launch.release();
    // Unlike cudaLaunchHostFunc's, this callback also runs after an error of the device: the step
    // fails then instead of waiting for ever.
    const cudaError_t error =
        cudaStreamAddCallback(StreamOf(context), OnStreamReached, released, 0);
    if (error != cudaSuccess) {
      released->error_ = error;
      Finish(released);
    }
  }

 protected:
  // Enqueues the work on the op's stream, the copy of the counts last.
  virtual absl::Status Enqueue(tensorflow::OpKernelContext* context,
                               std::unique_ptr<Launch>* launch) = 0;

  static absl::Status AllocateWorkspace(tensorflow::OpKernelContext* context, size_t bytes,
                                        tensorflow::Tensor* workspace) {
    return context->allocate_temp(
        tensorflow::DT_UINT8, tensorflow::TensorShape({static_cast<int64_t>(bytes)}), workspace);
  }

  // On the GPU and in pinned memory, for which a copy does not wait.
  static absl::Status AllocateCounts(tensorflow::OpKernelContext* context, int64_t n,
                                     Launch* launch) {
    tensorflow::AllocatorAttributes pinned;
    pinned.set_on_host(true);
    pinned.set_gpu_compatible(true);
    const tensorflow::TensorShape shape({n});
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, shape, &launch->counts));
    return context->allocate_temp(tensorflow::DT_INT64, shape, &launch->counts_on_host, pinned);
  }

  static absl::Status CopyCounts(tensorflow::OpKernelContext* context, Launch* launch) {
    return Checked(
        context,
        cudaMemcpyAsync(launch->counts_on_host.data(), launch->counts.data(),
                        launch->counts.TotalBytes(), cudaMemcpyDeviceToHost, StreamOf(context)),
        "could not copy its counts");
  }

 private:
  // In a thread of the driver, where neither CUDA calls nor long work are allowed.
  static void CUDART_CB OnStreamReached(cudaStream_t /*stream*/, cudaError_t error, void* data) {
    auto* launch = static_cast<Launch*>(data);
    launch->error_ = error;
    launch->context_->device()->tensorflow_cpu_worker_threads()->workers->Schedule(
        [launch] { Finish(launch); });
  }

  static void Finish(Launch* released) {
    std::unique_ptr<Launch> launch(released);
    tensorflow::OpKernelContext* context = launch->context_;
    const DoneCallback done = std::move(launch->done_);
    absl::Status status = Checked(context, launch->error_, "failed");
    if (status.ok()) status = launch->SetOutputs(context);
    if (!status.ok()) context->SetStatus(status);
    launch.reset();  // `done` may end the step, and the context with it
    done();
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_
