// Checks that shape functions of several ops make.
#ifndef SLIPSTREAM_CC_OPS_TF_SHAPE_CHECKS_H_
#define SLIPSTREAM_CC_OPS_TF_SHAPE_CHECKS_H_

#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

// The first inputs have these ranks.
inline absl::Status CheckRanks(tensorflow::shape_inference::InferenceContext* c,
                               const std::vector<int>& ranks) {
  tensorflow::shape_inference::ShapeHandle unused;
  for (size_t i = 0; i < ranks.size(); ++i) {
    TF_RETURN_IF_ERROR(c->WithRank(c->input(static_cast<int>(i)), ranks[i], &unused));
  }
  return absl::OkStatus();
}

// All inputs are scalars.
inline absl::Status ScalarInputs(tensorflow::shape_inference::InferenceContext* c) {
  return CheckRanks(c, std::vector<int>(c->num_inputs(), 0));
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SHAPE_CHECKS_H_
