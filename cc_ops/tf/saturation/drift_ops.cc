// Registration of SlipstreamRowDrift.
#include "absl/status/status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

REGISTER_OP("SlipstreamRowDrift")
    .Input("current: float")
    .Input("snapshot: float")
    .Output("drift: float")
    .Attr("metric: {'linf', 'l2', 'relative'} = 'linf'")
    .Attr("epsilon: float = 1e-12")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) -> absl::Status {
      tensorflow::shape_inference::ShapeHandle current, snapshot, merged;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &current));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &snapshot));
      TF_RETURN_IF_ERROR(c->Merge(current, snapshot, &merged));
      c->set_output(0, c->Vector(c->Dim(merged, 0)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Distance of embedding rows from their snapshot (Slipstream, arXiv 2404.04270, snapshot block).

A row with a NaN or an infinity in either input has a non-finite drift.

current: [rows, dim]. The rows as they are now.
snapshot: [rows, dim]. The same rows as they were copied at the start of the window.
drift: [rows]. One distance per row, not negative.
metric: `linf` is max_j |current_j - snapshot_j|, `l2` is ||current - snapshot|| and `relative` is
  ||current - snapshot|| / (||snapshot|| + epsilon).
epsilon: Positive. Added to the snapshot's norm by `relative`; the other metrics do not read it.
)doc");

}  // namespace slipstream
