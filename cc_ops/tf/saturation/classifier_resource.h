// The input classifier as a TensorFlow resource, and the kernels' base.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "tensorflow/core/framework/op_kernel.h"
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

inline absl::Status RequireScalar(const tensorflow::Tensor& tensor, const char* name) {
  if (tensor.dims() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", tensor.shape().DebugString(), "; allowed: a scalar"));
}

// A kernel whose input 0 is a classifier.
class ClassifierKernel : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    OP_REQUIRES_OK(context, RequireScalar(context->input(0), "handle"));
    ClassifierRef resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    OP_REQUIRES_OK(context, Run(context, &resource->classifier));
  }

 private:
  virtual absl::Status Run(tensorflow::OpKernelContext* context, InputClassifier* classifier) = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_RESOURCE_H_
