// Registers GPU kernels for the CPU, with CUDA emulated (core/testing/cuda_emulation).
//
// build_support/emulated_gpu.py includes this file before the sources of GPU kernels, which are
// unchanged. On the CPU a HostMemory annotation has no effect. Work on the stream of an op is done
// when the call that enqueues it returns, because TensorFlow's CPU kernels do not wait for streams.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_EMULATED_GPU_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_EMULATED_GPU_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <utility>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

// Without EIGEN_USE_GPU, TensorFlow's headers only declare this class.
struct Eigen::GpuDevice {
  cudaStream_t stream() const { return nullptr; }
};

// Replaces TensorFlow's function, which reads the device of a GPU.
template <>
inline const Eigen::GpuDevice& tensorflow::OpKernelContext::eigen_device() const {
  static const Eigen::GpuDevice device;
  return device;
}

#define DEVICE_GPU DEVICE_CPU

#define SLIPSTREAM_EMULATED_GPU
namespace slipstream {
inline void AfterStream(tensorflow::OpKernelContext* context, std::function<void()> then) {
  context->device()->tensorflow_cpu_worker_threads()->workers->Schedule(std::move(then));
}
}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_EMULATED_GPU_H_
