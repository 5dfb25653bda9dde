// The classifier as a TensorFlow resource.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace slipstream {

class ClassifierResource : public tensorflow::ResourceBase {
 public:
  explicit ClassifierResource(const ClassifierOptions& options) : classifier(options) {}
  std::string DebugString() const override {
    return absl::StrCat("SlipstreamClassifier of ", classifier.options().num_tables, " tables");
  }
  InputClassifier classifier;
};

// Returns the values of a batch's input, or null if the input is empty, which means that it is not
// given.
template <class T>
absl::Status ReadOptional(tensorflow::OpKernelContext* context, int input, const char* name,
                          int64_t batch, const T** values) {
  const tensorflow::Tensor& given = context->input(input);
  const int64_t n = given.NumElements();
  if (given.dims() != 1 || (n != 0 && n != batch)) {
    return absl::InvalidArgumentError(absl::StrCat(name, " has shape ", given.shape().DebugString(),
                                                   "; expected [", batch, "] or [0]"));
  }
  *values = n == 0 && batch > 0 ? nullptr : given.flat<T>().data();
  return absl::OkStatus();
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_
