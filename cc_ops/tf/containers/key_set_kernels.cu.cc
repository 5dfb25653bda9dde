// GPU kernels of key sets: the set's copy in GPU memory.
#define EIGEN_USE_GPU
#include "cc_ops/tf/containers/key_set_kernels.h"

#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/containers/table_on_gpu.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;

class AssignKeySetGpuKernel : public AssignKeySetKernel {
 public:
  using AssignKeySetKernel::AssignKeySetKernel;

 private:
  absl::Status CopyToDevice(OpKernelContext* context, KeySetContent* content) override {
    return CopyToGpu(context, content->keys.view(),
                     "SlipstreamKeySetAssign could not copy the set to the GPU",
                     &content->on_device);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("SlipstreamKeySet").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
    MemoryChecked<CreateResourceKernel<KeySetResource>>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamKeySetAssign")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("keys"),
                        MemoryChecked<AssignKeySetGpuKernel>);

}  // namespace
}  // namespace slipstream
