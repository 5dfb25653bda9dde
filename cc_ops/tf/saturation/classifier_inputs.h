// Inputs and outputs that kernels of both classifiers have: settings, numbers of keys, and what
// becomes of the inputs of a batch.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_INPUTS_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_INPUTS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/skip_rule.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

// Of the attributes `mode`, whose values the registration limits, and `is_shadow`.
inline absl::Status InitSettings(tensorflow::OpKernelConstruction* context,
                                 ClassifierSettings* settings) {
  std::string mode;
  TF_RETURN_IF_ERROR(context->GetAttr("mode", &mode));
  if (mode == "drift") settings->mode = SkipMode::kDrift;
  if (mode == "remembered_loss") settings->mode = SkipMode::kRememberedLoss;
  if (mode == "random") settings->mode = SkipMode::kRandom;
  return context->GetAttr("is_shadow", &settings->is_shadow);
}

// Of inputs 1 to 3.
inline absl::Status ReadSettings(tensorflow::OpKernelContext* context,
                                 ClassifierSettings* settings) {
  TF_RETURN_IF_ERROR(ReadScalar(context, 1, "threshold", &settings->threshold));
  TF_RETURN_IF_ERROR(ReadScalar(context, 2, "random_share", &settings->random_share));
  return ReadScalar(context, 3, "keep_rate", &settings->keep_rate);
}

// Inputs 1 to 3, in host memory: a number per key; [n] each.
struct NumbersOfKeys {
  absl::Status Read(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor &a = context->input(1), &b = context->input(2), &c = context->input(3);
    if (a.dims() != 1 || b.shape() != a.shape() || c.shape() != a.shape()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tables, keys and their values have shapes ", a.shape().DebugString(), ", ",
                       b.shape().DebugString(), " and ", c.shape().DebugString(),
                       "; allowed: three vectors of one length"));
    }
    tables = a.flat<int32_t>().data();
    keys = b.flat<int64_t>().data();
    numbers = c.flat<float>().data();
    n = a.NumElements();
    return absl::OkStatus();
  }

  const int32_t* tables = nullptr;
  const int64_t* keys = nullptr;
  const float* numbers = nullptr;
  int64_t n = 0;
};

// Allocates outputs 0 to 2.
inline absl::Status AllocateClassified(tensorflow::OpKernelContext* context, int64_t batch,
                                       Classified* result) {
  const tensorflow::TensorShape shape({batch});
  tensorflow::Tensor *skippable = nullptr, *score = nullptr, *weight = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, shape, &skippable));
  TF_RETURN_IF_ERROR(context->allocate_output(1, shape, &score));
  TF_RETURN_IF_ERROR(context->allocate_output(2, shape, &weight));
  *result = {skippable->flat<bool>().data(), score->flat<float>().data(),
             weight->flat<float>().data()};
  return absl::OkStatus();
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_INPUTS_H_
