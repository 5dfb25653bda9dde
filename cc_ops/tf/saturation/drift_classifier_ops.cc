// Registrations of the drift of rows, and of the ops that classify examples by drift on the device
// of their keys.
#include "absl/status/status.h"
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

REGISTER_OP("SlipstreamRowDrift")
    .Input("current: float")
    .Input("snapshot: float")
    .Output("drift: float")
    .Attr("metric: {'linf', 'l2'} = 'linf'")
    .SetShapeFn(Shapes("[n, d], [n, d] -> [n]"))
    .Doc(R"doc(
Computes the distance of each row from its snapshot.

The drift of a row is not finite if either input has a NaN or an infinity in the row. Source:
Slipstream, arXiv 2404.04270, snapshots.

current: [rows, dim]. The current rows.
snapshot: [rows, dim]. The same rows at the start of the window.
drift: [rows]. One distance per row, at least 0.
metric: `linf` is max_j |current_j - snapshot_j|, `l2` is ||current - snapshot||.
)doc");

REGISTER_OP("SlipstreamDriftClassifier")
    .Input("alpha: double")
    .Output("handle: resource")
    .Attr("num_tables: int >= 1")
    .Attr("seed: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> []"))
    .Doc(R"doc(
Creates a classifier that decides by drift or at random, on the device of the keys.

At first no key is tracked and every example is kept. The classifier is deleted with the last copy
of its handle.

alpha: Scalar, above 0, at most 1. Fraction of an example's lookups that must be saturated.
handle: Scalar. The new classifier.
num_tables: Number of tables.
seed: Seed of the random numbers for subsampling and random dropping.
)doc");

REGISTER_OP("SlipstreamDriftClassifierSetDrift")
    .Input("handle: resource")
    .Input("tables: int32")
    .Input("keys: int64")
    .Input("drift: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n], [n]"))
    .Doc(R"doc(
Replaces the drifts of all tracked keys. All inputs are in host memory.

handle: Scalar. The classifier.
tables: [n]. Index of each key's table.
keys: [n]. Each key of a table at most once.
drift: [n]. At least 0. A key whose drift is not finite is not tracked.
)doc");

REGISTER_OP("SlipstreamDriftClassifierConfigure")
    .Input("handle: resource")
    .Input("threshold: float")
    .Input("random_fraction: double")
    .Input("keep_rate: double")
    .Attr("mode: {'none', 'drift', 'random'}")
    .Attr("is_shadow: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], [], []"))
    .Doc(R"doc(
Sets which examples can be dropped from the next batch on.

handle: Scalar. The classifier.
threshold: Scalar, at least 0. Mode `drift`: examples with a lower score can be dropped.
random_fraction: Scalar, 0 to 1. Mode `random`: probability that an example can be dropped.
keep_rate: Scalar, 0 to below 1. Mode `drift`: probability that a droppable example is kept, with
  weight 1 / keep_rate. Mode `random` ignores it and keeps none.
mode: Rule by which examples can be dropped. `none`: no example. `drift`: saturated keys. `random`:
  a random choice, for comparison.
is_shadow: Whether all examples are kept with weight 1, for a dry run.
)doc");

REGISTER_OP("SlipstreamClassifyByDrift")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("tables: int32")
    .Input("row_splits: int64")
    .Output("skippable: bool")
    .Output("score: float")
    .Output("weight: float")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) -> absl::Status {
      tensorflow::shape_inference::DimensionHandle batch;
      TF_RETURN_IF_ERROR(Shapes("[], [n], [n], [?]")(c));
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(c->input(3), 0), 1, &batch));
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(batch));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decides which examples of a batch can be dropped.

On a GPU the host does not wait for the result.

handle: Scalar. The classifier.
keys: [n]. The keys of all examples, example by example.
tables: [n]. Index of each key's table; below 0 for padding.
row_splits: [batch + 1]. Start of each example's keys, and n. Only the CPU kernel checks them; the
  GPU kernel clamps them to the valid range.
skippable: [batch]. Whether each example can be dropped.
score: [batch]. The score of an example is the ceil(alpha * m)-th smallest drift of its m lookups,
  where a key without a drift counts as +inf. +inf without lookups.
weight: [batch]. 0 drops the example. Otherwise the number of examples that it represents: 1, or
  1 / keep_rate for a droppable example that is kept.
)doc");

}  // namespace slipstream
