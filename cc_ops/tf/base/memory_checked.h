// Kernels that end a step with an error where memory runs out.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_MEMORY_CHECKED_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_MEMORY_CHECKED_H_

#include <new>
#include <stdexcept>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

// Wraps a kernel where it is registered: memory that runs out becomes a status. Kernels that know
// their tables say more themselves; the core's functions say what they leave behind.
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
    return absl::ResourceExhaustedError(absl::StrCat(
        "out of memory in ", this->type_string(), " '", this->name(),
        "'; what it works on is intact. Make the batches smaller, or free memory and go on"));
  }
};

}  // namespace slipstream

#define SLIPSTREAM_CPU_KERNEL(name, ...)                             \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), \
                          slipstream::MemoryChecked<__VA_ARGS__>)

// host_memory: of inputs and outputs beside `handle`, e.g. .HostMemory("keys").
#define SLIPSTREAM_ON_GPU(name) Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("handle")
#define SLIPSTREAM_GPU_KERNEL(name, host_memory, ...)          \
  REGISTER_KERNEL_BUILDER(SLIPSTREAM_ON_GPU(name) host_memory, \
                          slipstream::MemoryChecked<__VA_ARGS__>)

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_MEMORY_CHECKED_H_
