// Checks that shape functions of several ops make.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_SHAPE_CHECKS_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_SHAPE_CHECKS_H_

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

// Inputs [begin, end) are scalars.
inline absl::Status CheckScalars(tensorflow::shape_inference::InferenceContext* c, int begin,
                                 int end) {
  tensorflow::shape_inference::ShapeHandle unused;
  for (int i = begin; i < end; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  return absl::OkStatus();
}

// All inputs are scalars.
inline absl::Status ScalarInputs(tensorflow::shape_inference::InferenceContext* c) {
  return CheckScalars(c, 0, c->num_inputs());
}

// All inputs and outputs are scalars.
inline absl::Status ScalarsOnly(tensorflow::shape_inference::InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
  return ScalarInputs(c);
}

// A handle; then tables, keys and a number per key: three vectors of one length.
inline absl::Status NumbersOfKeysShape(tensorflow::shape_inference::InferenceContext* c) {
  tensorflow::shape_inference::ShapeHandle handle, n;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &handle));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &n));
  TF_RETURN_IF_ERROR(c->Merge(n, c->input(2), &n));
  return c->Merge(n, c->input(3), &n);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_SHAPE_CHECKS_H_
