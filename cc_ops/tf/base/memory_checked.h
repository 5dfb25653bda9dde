// Reports an error of the step instead of ending the process when memory runs out.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_MEMORY_CHECKED_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_MEMORY_CHECKED_H_

#include <new>
#include <stdexcept>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

// Wraps a kernel in its registration, so that std::bad_alloc becomes a status. Kernels of tables
// add the name of the table. The functions of the core document their state after std::bad_alloc.
template <class Kernel>
class MemoryChecked final : public Kernel {
 public:
  using Kernel::Kernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    try {
      Kernel::Compute(context);
    } catch (const std::bad_alloc&) {
      context->CtxFailure(Exhausted());
    } catch (const std::length_error&) {
      context->CtxFailure(Exhausted());
    }
  }

 private:
  absl::Status Exhausted() const {
    return absl::ResourceExhaustedError(
        absl::StrCat("out of memory in ", this->type_string(), " '", this->name(),
                     "'; its inputs and resources are intact. Reduce the batch size, or free "
                     "memory and continue"));
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
