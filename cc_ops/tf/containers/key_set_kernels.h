// What the CPU and the GPU kernels of key sets share: the resource and how it is filled.
#ifndef SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_SET_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_SET_KERNELS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/replaced_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

// One content of a set: never changed, only replaced.
struct KeySetContent {
  std::string Describe() const {
    return absl::StrCat("SlipstreamKeySet of ", keys.size(), " keys");
  }

  KeySet keys;
  tensorflow::Tensor on_device;  // uint8, a copy of the entries in GPU memory; unused on the CPU
};

using KeySetResource = ReplacedResource<KeySetContent>;

// The set of an input; the kernel's own reference to it.
inline absl::Status FindKeySet(tensorflow::OpKernelContext* context,
                               tensorflow::core::RefCountPtr<KeySetResource>* resource,
                               int input = 0) {
  if (context->input(input).dims() != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the handle of the key set has shape ",
                                                   context->input(input).shape().DebugString(),
                                                   "; allowed: a scalar"));
  }
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, input), resource);
}

// Of the copy in GPU memory.
inline KeySetView ViewOnDevice(const KeySetContent& content) {
  KeySetView view = content.keys.view();
  view.entries = static_cast<const KeySetEntry*>(content.on_device.data());
  return view;
}

// Builds the content from input 1, which is in host memory.
class AssignKeySetKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<KeySetResource> resource;
    OP_REQUIRES_OK(context, FindKeySet(context, &resource));
    const tensorflow::Tensor& keys = context->input(1);
    OP_REQUIRES(context, keys.dims() == 1,
                absl::InvalidArgumentError(absl::StrCat(
                    "keys have shape ", keys.shape().DebugString(), "; allowed: a vector")));
    auto content = std::make_shared<KeySetContent>();
    OP_REQUIRES_OK(context,
                   ToAbsl(content->keys.Build(keys.flat<int64_t>().data(), keys.NumElements())));
    OP_REQUIRES_OK(context, CopyToDevice(context, content.get()));
    resource->Replace(std::move(content));
  }

 private:
  // Fills content->on_device where a kernel needs it.
  virtual absl::Status CopyToDevice(tensorflow::OpKernelContext* /*context*/,
                                    KeySetContent* /*content*/) {
    return absl::OkStatus();
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_SET_KERNELS_H_
