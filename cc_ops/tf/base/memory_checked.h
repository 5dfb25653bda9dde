// Reports an error of the step instead of ending the process when memory runs out.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_MEMORY_CHECKED_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_MEMORY_CHECKED_H_

#include <new>
#include <stdexcept>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

// Returns run(), or ResourceExhausted that names the kernel instead of std::bad_alloc.
template <class Run>
absl::Status WithMemoryChecked(const tensorflow::OpKernel& kernel, const Run& run) {
  const auto exhausted = [&kernel] {
    return absl::ResourceExhaustedError(
        absl::StrCat("out of memory in ", kernel.type_string(), " '", kernel.name(),
                     "'; its inputs and resources are intact. Reduce the batch size, or free "
                     "memory and continue"));
  };
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return exhausted();
  } catch (const std::length_error&) {
    return exhausted();
  }
}

// Wraps a kernel in its registration, so that std::bad_alloc becomes a status. Kernels of tables
// add the name of the table. The functions of the core document their state after std::bad_alloc.
template <class Kernel>
class MemoryChecked final : public Kernel {
 public:
  using Kernel::Kernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const absl::Status status = WithMemoryChecked(*this, [&] {
      Kernel::Compute(context);
      return absl::OkStatus();
    });
    if (!status.ok()) context->CtxFailure(status);
  }
};

}  // namespace slipstream

#define SLIPSTREAM_CPU_KERNEL(name, ...)                             \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), \
                          slipstream::MemoryChecked<__VA_ARGS__>)

// Registers a GPU kernel. host_memory: the inputs and outputs in host memory in addition to
// `handle`, for example .HostMemory("keys").
#define SLIPSTREAM_ON_GPU(name) Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("handle")
#define SLIPSTREAM_GPU_KERNEL(name, host_memory, ...)          \
  REGISTER_KERNEL_BUILDER(SLIPSTREAM_ON_GPU(name) host_memory, \
                          slipstream::MemoryChecked<__VA_ARGS__>)

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_MEMORY_CHECKED_H_
