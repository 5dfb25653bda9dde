// Copies a table that is built on the CPU to GPU memory.
#ifndef SLIPSTREAM_CC_OPS_TF_CONTAINERS_TABLE_ON_GPU_H_
#define SLIPSTREAM_CC_OPS_TF_CONTAINERS_TABLE_ON_GPU_H_

#include "cc_ops/tf/base/gpu_step.h"

namespace slipstream {

// Copies the entries of a table: `on_device` becomes uint8 [bytes].
struct OnGpu {
  template <class Content>
  static absl::Status CopyEntries(tensorflow::OpKernelContext* context, Content* content) {
    const auto view = content->table.view();
    tensorflow::Tensor* const copy = &content->on_device;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8,
                                              tensorflow::TensorShape({view.bytes()}), copy));
    return CopyAndWait(context, copy->data(), view.entries, static_cast<size_t>(view.bytes()),
                       cudaMemcpyHostToDevice, "could not copy its keys to the GPU");
  }
};

// Returns the view of the copy.
template <class Content>
auto ViewOnGpu(const Content& content) {
  auto view = content.table.view();
  view.entries = static_cast<decltype(view.entries)>(content.on_device.data());
  return view;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_CONTAINERS_TABLE_ON_GPU_H_
