// The input classifier as a TensorFlow resource, and the base of its kernels.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_

#include <string>

#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "cc_ops/tf/base/replaced_resource.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

class ClassifierResource : public tensorflow::ResourceBase {
 public:
  explicit ClassifierResource(const ClassifierOptions& options) : classifier(options) {}
  std::string DebugString() const override {
    return absl::StrCat("SlipstreamClassifier of ", classifier.options().num_tables, " tables");
  }
  InputClassifier classifier;
};

using ClassifierRef = tensorflow::core::RefCountPtr<ClassifierResource>;

using ClassifierKernel = ResourceKernel<ClassifierResource>;

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_
