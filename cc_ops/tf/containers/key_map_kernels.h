// What the CPU and the GPU kernels of key maps share: resource and checks.
#ifndef SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_MAP_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_MAP_KERNELS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/containers/key_map.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/replaced_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

// One content of a map: never changed, only replaced.
struct KeyMapContent {
  std::string Describe() const {
    return absl::StrCat("SlipstreamKeyMap of ", keys.size(), " keys");
  }

  KeyMap keys;
  tensorflow::Tensor on_device;  // uint8, a copy of the entries in GPU memory; unused on the CPU
};

using KeyMapResource = ReplacedResource<KeyMapContent>;

// The map of input 0, for the keys of input 1; the kernel's own reference to it.
inline absl::Status FindKeyMap(tensorflow::OpKernelContext* context,
                               tensorflow::core::RefCountPtr<KeyMapResource>* resource) {
  const tensorflow::Tensor &handle = context->input(0), &keys = context->input(1);
  if (handle.dims() != 0 || keys.dims() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("handle and keys have shapes ", handle.shape().DebugString(), " and ",
                     keys.shape().DebugString(), "; allowed: a scalar and a vector"));
  }
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), resource);
}

// Its content.
inline absl::Status ReadKeyMap(tensorflow::OpKernelContext* context,
                               std::shared_ptr<const KeyMapContent>* content) {
  tensorflow::core::RefCountPtr<KeyMapResource> resource;
  TF_RETURN_IF_ERROR(FindKeyMap(context, &resource));
  *content = resource->content();
  return absl::OkStatus();
}

// Builds the content from inputs 1 and 2, which are in host memory.
class AssignKeyMapKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<KeyMapResource> resource;
    OP_REQUIRES_OK(context, FindKeyMap(context, &resource));
    const tensorflow::Tensor &keys = context->input(1), &states = context->input(2);
    const int64_t n = keys.NumElements();
    OP_REQUIRES(
        context, states.dims() == 1 && (states.NumElements() == n || states.NumElements() == 0),
        absl::InvalidArgumentError(absl::StrCat("states have shape ", states.shape().DebugString(),
                                                "; allowed: [", n, "] or [0]")));
    const uint8_t* given = states.NumElements() == 0 ? nullptr : states.flat<uint8_t>().data();
    auto content = std::make_shared<KeyMapContent>();
    OP_REQUIRES_OK(context, ToAbsl(content->keys.Build(keys.flat<int64_t>().data(), given, n)));
    OP_REQUIRES_OK(context, CopyToDevice(context, content.get()));
    resource->Replace(std::move(content));
  }

 private:
  // Fills content->on_device where a kernel needs it.
  virtual absl::Status CopyToDevice(tensorflow::OpKernelContext* /*context*/,
                                    KeyMapContent* /*content*/) {
    return absl::OkStatus();
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_MAP_KERNELS_H_
