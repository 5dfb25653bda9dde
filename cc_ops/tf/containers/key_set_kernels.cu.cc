// GPU kernels of key sets: the set's copy in GPU memory.
#define EIGEN_USE_GPU
#include "cc_ops/tf/containers/key_set_kernels.h"

#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::TensorShape;

class AssignKeySetGpuKernel : public AssignKeySetKernel {
 public:
  using AssignKeySetKernel::AssignKeySetKernel;

 private:
  absl::Status CopyToDevice(OpKernelContext* context, KeySetContent* content) override {
    const KeySetView view = content->keys.view();
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, TensorShape({view.num_slots}),
                                              &content->on_device));
    if (view.num_slots == 0) return absl::OkStatus();
    // Pageable memory: returns when the slots have been read. Once a window.
    return Checked(cudaMemcpyAsync(content->on_device.flat<int64_t>().data(), view.slots,
                                   view.num_slots * sizeof(int64_t), cudaMemcpyHostToDevice,
                                   StreamOf(context)),
                   "SlipstreamKeySetAssign could not copy the set to the GPU");
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
