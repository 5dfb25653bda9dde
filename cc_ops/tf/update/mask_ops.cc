// Registration of the op that masks sparse gradients.
#include "absl/status/status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status MaskGradientsShape(InferenceContext* c) {
  ShapeHandle handle, keys, gradients, kept;
  DimensionHandle rows;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &handle));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(2), 1, &gradients));
  if (c->RankKnown(gradients)) {
    TF_RETURN_IF_ERROR(c->Merge(c->Dim(keys, 0), c->Dim(gradients, 0), &rows));
    TF_RETURN_IF_ERROR(c->ReplaceDim(gradients, 0, c->UnknownDim(), &kept));
  } else {
    kept = c->UnknownShape();
  }
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, kept);
  c->set_output(2, c->Scalar());
  c->set_output(3, c->Scalar());
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("SlipstreamMaskGradients")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("gradients: float")
    .Output("kept_keys: Tkeys")
    .Output("kept_gradients: float")
    .Output("masked: int64")
    .Output("offered: int64")
    .Attr("Tkeys: {int32, int64}")
    .Attr("deduplicate: bool = true")
    .SetIsStateful()
    .SetShapeFn(MaskGradientsShape)
    .Doc(R"doc(
Removes the gradient rows of masked keys.

Masked rows are removed from the output, not set to zero, and their values are never read. The
result has the same bits for any number of threads. GPUs compute the same bits, except for the sign
and payload of NaN, and for subnormal numbers, which TensorFlow's CPU threads replace by zero.

handle: Scalar. A SlipstreamKeySet with the masked keys.
keys: [n]. The key of each row.
gradients: [n, ...]. One row per key, of any shape.
kept_keys: [kept]. The key of each remaining row.
kept_gradients: [kept, ...]. The remaining rows.
masked: Scalar, in host memory. Number of removed rows: offered - kept.
offered: Scalar, in host memory. Number of rows before masking: n, or the number of different keys
  with `deduplicate`.
deduplicate: Whether the rows of equal keys are summed first, in the order of the input. More than
  256 rows of a key are summed in chunks of 256, and then the sums of the chunks in order. The kept
  keys then ascend. Otherwise all rows keep the order of the input.
)doc");

}  // namespace slipstream
