// The state that a data pipeline and the training loop share, as a TensorFlow resource.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_LOOK_AHEAD_RESOURCE_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_LOOK_AHEAD_RESOURCE_H_

#include <string>

#include "cc_ops/core/saturation/look_ahead.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

class LookAheadResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "SlipstreamLookAhead"; }
  LookAhead ahead;
};

using LookAheadRef = tensorflow::core::RefCountPtr<LookAheadResource>;

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_LOOK_AHEAD_RESOURCE_H_
