// Shared parts of GPU kernels: the stream of the op, CUDA errors as statuses, and outputs with a
// number of rows that only the GPU computes.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_

// Define EIGEN_USE_GPU before including this or any TensorFlow header.
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace slipstream {

// Returns a CUDA error as an Internal error that names the op. Clears the last error of the thread,
// which a later op would report otherwise. what: the text for the message, for example "could not
// be launched".
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

// Calls functions after streams have finished their work. One thread waits for events in the order
// of the calls. A callback on the stream would delay the next kernels until it returns.
class EventThread {
 public:
  using Function = std::function<void(cudaError_t)>;

  // The object is never deleted, because its thread uses it until the process ends.
  static EventThread& Get() {
    static EventThread& thread = *new EventThread;
    return thread;
  }

  // Calls then(error) after all work that the stream has now. `error` is the error of the device.
  // The function must be short, because later functions wait for it. If Then returns an error, it
  // does not call the function.
  cudaError_t Then(cudaStream_t stream, Function then) {
    Waiting waiting = {nullptr, std::move(then)};
    cudaError_t error =
        cudaEventCreateWithFlags(&waiting.event, cudaEventDisableTiming | cudaEventBlockingSync);
    if (error != cudaSuccess) return error;
    error = cudaEventRecord(waiting.event, stream);
    if (error != cudaSuccess) {
      cudaEventDestroy(waiting.event);
      return error;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(waiting));
    is_filled_.notify_one();
    return cudaSuccess;
  }

 private:
  struct Waiting {
    cudaEvent_t event;
    Function then;
  };

  EventThread() : thread_([this] { Work(); }) { thread_.detach(); }

  void Work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      is_filled_.wait(lock, [this] { return !queue_.empty(); });
      const Waiting waiting = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      const cudaError_t error = cudaEventSynchronize(waiting.event);
      cudaEventDestroy(waiting.event);
      waiting.then(error);
    }
  }

  std::mutex mutex_;  // Guards queue_.
  std::condition_variable is_filled_;
  std::deque<Waiting> queue_;
  std::thread thread_;  // The last member, because it uses the others.
};

// Base of kernels whose number of output rows is computed on the GPU. The kernel does not block a
// thread to wait for that number: it enqueues all work and a copy of the counts to pinned memory.
// After the copy another thread slices the outputs, without a further launch.
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

   protected:
    // Slices the outputs to the sizes in `counts_on_host`.
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
    // The counterpart of MemoryChecked, which is for synchronous kernels.
    try {
      status = Enqueue(context, &launch);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError(
          absl::StrCat("out of memory in ", type_string(), " '", name(),
                       "'. Reduce the batch size or free memory and continue"));
    }
    if (!status.ok()) {
      context->SetStatus(status);
      done();
      return;
    }
    launch->context_ = context;
    launch->done_ = std::move(done);
    Launch* const released = launch.release();
    // Finish runs in a thread of TensorFlow, because `done` may run other kernels.
    const cudaError_t error =
        EventThread::Get().Then(StreamOf(context), [released](cudaError_t found) {
          released->error_ = found;
          released->context_->device()->tensorflow_cpu_worker_threads()->workers->Schedule(
              [released] { Finish(released); });
        });
    if (error != cudaSuccess) {
      released->error_ = error;
      Finish(released);
    }
  }

 protected:
  // Enqueues the work on the stream of the op, with CopyCounts last, and sets `launch`.
  virtual absl::Status Enqueue(tensorflow::OpKernelContext* context,
                               std::unique_ptr<Launch>* launch) = 0;

  static absl::Status AllocateWorkspace(tensorflow::OpKernelContext* context, size_t bytes,
                                        tensorflow::Tensor* workspace) {
    return context->allocate_temp(
        tensorflow::DT_UINT8, tensorflow::TensorShape({static_cast<int64_t>(bytes)}), workspace);
  }

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

 private:
  static void Finish(Launch* released) {
    std::unique_ptr<Launch> launch(released);
    tensorflow::OpKernelContext* context = launch->context_;
    const DoneCallback done = std::move(launch->done_);
    absl::Status status = Checked(context, launch->error_, "failed");
    if (status.ok()) status = launch->SetOutputs(context);
    if (!status.ok()) context->SetStatus(status);
    launch.reset();  // `done` may end the step and delete the context
    done();
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_GPU_STEP_H_
