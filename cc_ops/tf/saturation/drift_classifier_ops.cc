// Registration of the drift of rows, and of the ops that classify inputs by drift on the device
// that their keys are on.
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
Distance of embedding rows from their snapshot (Slipstream, arXiv 2404.04270, snapshot block).

A row with a NaN or an infinity in either input has a non-finite drift.

current: [rows, dim]. The rows as they are now.
snapshot: [rows, dim]. The same rows as they were copied at the start of the window.
drift: [rows]. One distance per row, not negative.
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
Makes a classifier that knows no drift and skips nothing; it lives until the last copy of its handle
is gone.

alpha: Scalar, above 0, at most 1. Share of an input's lookups that must be saturated.
handle: Of the classifier.
num_tables: Tables that keys may be of.
seed: Of thinning, and of skipping at random.
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

handle: Of the classifier.
tables: [n]. Index of each key's table.
keys: [n]. Each once in a table.
drift: [n]. At least 0; a key whose drift is not finite is not tracked.
)doc");

REGISTER_OP("SlipstreamDriftClassifierConfigure")
    .Input("handle: resource")
    .Input("threshold: float")
    .Input("random_share: double")
    .Input("keep_rate: double")
    .Attr("mode: {'none', 'drift', 'random'}")
    .Attr("is_shadow: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], [], []"))
    .Doc(R"doc(
Sets what is skippable from the next batch on.

handle: Of the classifier.
threshold: Scalar, at least 0. Read by `drift`: inputs with a lower skip score are skippable.
random_share: Scalar, 0 to 1. Read by `random`: the probability of an input to be skippable.
keep_rate: Scalar, 0 to below 1. Share of the skippable inputs that is kept, with a weight; not
  `random`.
mode: `none`: nothing is skippable.
is_shadow: All inputs are kept, with weight 1.
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
Says which inputs of a batch can be skipped. On a GPU nothing is read on the host.

handle: Of the classifier.
keys: [n]. Of the inputs, one input after the other.
tables: [n]. Index of each key's table; below 0, a key is padding.
row_splits: [batch + 1]. Where the keys of each input begin, and n; which the CPU checks.
skippable: [batch].
score: [batch]. Skip scores: the drift that a share of alpha of an input's lookups reach at most.
weight: [batch]. 0: the input is left out; else the number of inputs that it stands for.
)doc");

}  // namespace slipstream
