// What a data pipeline and the training loop share, as a TensorFlow resource.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_LOOK_AHEAD_RESOURCE_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_LOOK_AHEAD_RESOURCE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/look_ahead.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

class LookAheadResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "SlipstreamLookAhead"; }
  LookAhead ahead;
};

using LookAheadRef = tensorflow::core::RefCountPtr<LookAheadResource>;

// The resource of an input that must be one handle.
inline absl::Status FindLookAhead(tensorflow::OpKernelContext* context, int input,
                                  LookAheadRef* resource) {
  // TensorFlow reads the first handle of a tensor without a look at how many there are.
  const tensorflow::Tensor& handle = context->input(input);
  if (handle.dims() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("handle has shape ", handle.shape().DebugString(), "; allowed: a scalar"));
  }
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, input), resource);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_LOOK_AHEAD_RESOURCE_H_
