// The copy in GPU memory of a table that is built on the CPU.
#ifndef SLIPSTREAM_CC_OPS_TF_CONTAINERS_TABLE_ON_GPU_H_
#define SLIPSTREAM_CC_OPS_TF_CONTAINERS_TABLE_ON_GPU_H_

#include "cc_ops/tf/base/gpu_step.h"

namespace slipstream {

// Copies a table's entries: `on_gpu` becomes uint8 [bytes].
//   what: what is to be said if that fails.
template <class View>
absl::Status CopyToGpu(tensorflow::OpKernelContext* context, const View& view, const char* what,
                       tensorflow::Tensor* on_gpu) {
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8,
                                            tensorflow::TensorShape({view.bytes()}), on_gpu));
  if (view.bytes() == 0) return absl::OkStatus();
  // Pageable memory: returns when the entries have been read. Once a window.
  return Checked(cudaMemcpyAsync(on_gpu->data(), view.entries, static_cast<size_t>(view.bytes()),
                                 cudaMemcpyHostToDevice, StreamOf(context)),
                 what);
}

// The view of the copy.
template <class View>
View ViewOnGpu(View view, const tensorflow::Tensor& on_gpu) {
  view.entries = static_cast<const typename View::Entry*>(on_gpu.data());
  return view;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_CONTAINERS_TABLE_ON_GPU_H_
