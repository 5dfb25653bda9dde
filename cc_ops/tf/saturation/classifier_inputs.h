// Inputs and outputs of the kernels of both classifiers: settings, one number per key, and the
// decisions about a batch.
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

// Reads the attributes `mode` (the registration limits its values) and `is_shadow`, and the inputs
// threshold, random_fraction and keep_rate, which are inputs 1 to 3.
inline absl::Status ReadSettings(tensorflow::OpKernelContext* context,
                                 ClassifierSettings* settings) {
  std::string mode;
  TF_RETURN_IF_ERROR(ReadAttribute(context, "mode", &mode));
  if (mode == "drift") settings->mode = SkipMode::kDrift;
  if (mode == "predicted_loss") settings->mode = SkipMode::kPredictedLoss;
  if (mode == "random") settings->mode = SkipMode::kRandom;
  TF_RETURN_IF_ERROR(ReadAttribute(context, "is_shadow", &settings->is_shadow));
  TF_RETURN_IF_ERROR(ReadScalar(context, 1, "threshold", &settings->threshold));
  TF_RETURN_IF_ERROR(ReadScalar(context, 2, "random_fraction", &settings->random_fraction));
  return ReadScalar(context, 3, "keep_rate", &settings->keep_rate);
}

// Inputs 1 to 3, [n] each, in host memory: for each key the index of its table, the key and a
// number.
struct NumbersOfKeys {
  absl::Status Read(tensorflow::OpKernelContext* context) {
    TF_RETURN_IF_ERROR(CheckInputs(context, 1, "tables: [n], keys: [n], values: [n]"));
    tables = Data<int32_t>(context, 1);
    keys = Data<int64_t>(context, 2);
    numbers = Data<float>(context, 3);
    n = context->input(1).NumElements();
    return absl::OkStatus();
  }

  const int32_t* tables = nullptr;
  const int64_t* keys = nullptr;
  const float* numbers = nullptr;
  int64_t n = 0;
};

// Allocates the outputs skippable, score and weight, which are outputs 0 to 2.
inline absl::Status AllocateClassified(tensorflow::OpKernelContext* context, int64_t batch,
                                       Classified* result) {
  const tensorflow::TensorShape shape({batch});
  TF_RETURN_IF_ERROR(Allocate(context, 0, shape, &result->skippable));
  TF_RETURN_IF_ERROR(Allocate(context, 1, shape, &result->score));
  return Allocate(context, 2, shape, &result->weight);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_CLASSIFIER_INPUTS_H_
