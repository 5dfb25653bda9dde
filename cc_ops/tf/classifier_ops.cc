// Registration of the input classifier's ops (Slipstream, arXiv 2404.04270, input classifier
// block).
#include "absl/status/status.h"
#include "cc_ops/tf/feature_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status ScalarOutput(InferenceContext* c) {
  ShapeHandle alpha;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &alpha));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

// Ranks of the keys and row splits; the batch size, where a feature's layout tells it.
absl::Status ClassifyShape(InferenceContext* c) {
  ShapeHandle handle;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &handle));
  int num_keys, num_splits;
  TF_RETURN_IF_ERROR(c->GetAttr("num_keys", &num_keys));
  TF_RETURN_IF_ERROR(c->GetAttr("num_splits", &num_splits));
  DimensionHandle batch = c->UnknownDim();
  for (int i = 0; i < num_keys; ++i) {
    ShapeHandle keys;
    TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1 + i), 1, &keys));
    TF_RETURN_IF_ERROR(c->WithRankAtMost(keys, 2, &keys));
    // A vector may be flat keys with row splits; a matrix has a row per input.
    if (c->RankKnown(keys) && c->Rank(keys) == 2) {
      TF_RETURN_IF_ERROR(c->Merge(batch, c->Dim(keys, 0), &batch));
    }
  }
  for (int i = 0; i < num_splits; ++i) {
    ShapeHandle splits;
    DimensionHandle rows;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(1 + num_keys + i), 1, &splits));
    TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &rows));
    TF_RETURN_IF_ERROR(c->Merge(batch, rows, &batch));
  }
  c->set_output(0, c->Vector(batch));
  c->set_output(1, c->Vector(batch));
  return absl::OkStatus();
}

absl::Status SetDriftShape(InferenceContext* c) {
  ShapeHandle handle, merged;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &handle));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &merged));
  TF_RETURN_IF_ERROR(c->Merge(merged, c->input(2), &merged));
  return c->Merge(merged, c->input(3), &merged);
}

absl::Status AllScalarInputs(InferenceContext* c) {
  for (int i = 0; i < c->num_inputs(); ++i) {
    ShapeHandle scalar;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &scalar));
  }
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("SlipstreamClassifier")
    .Input("alpha: double")
    .Output("handle: resource")
    .Attr("num_tables: int >= 1")
    .Attr("reservoir_size: int >= 1 = 8192")
    .Attr("seed: int = 0")
    .SetIsStateful()
    .SetShapeFn(ScalarOutput)
    .Doc(R"doc(
Creates an input classifier; it lives until the last copy of its handle is gone.

It holds the drifts of the tracked keys, a threshold, a uniform sample of the window's inputs and
counts. At first no key is tracked and nothing is skipped.

alpha: Share of an input's lookups that must be saturated: above 0, at most 1. An input (of type
  double: in float32, ceil(0.6 * 10) is 7) rather than an attribute.
handle: The new classifier.
num_tables: Number of tables; keys of different tables are different keys.
reservoir_size: Most inputs in the sample.
seed: Seeds the sample and random skipping.
)doc");

REGISTER_OP("SlipstreamClassifyInputs")
    .Input("handle: resource")  //
    SLIPSTREAM_FEATURE_INPUTS.Output("skippable: bool")
    .Output("score: float")
    .Attr("observe: bool = true")
    .SetIsStateful()
    .SetShapeFn(ClassifyShape)
    .Doc(
        "Tells which inputs of a batch can be skipped.\n\n"
        "The skip score of an input with m lookups is its ceil(alpha * m)-th smallest drift, "
        "untracked keys counting as +inf; +inf for an input without lookups.\n\n"
        "handle: Of the classifier.\n"  //
        SLIPSTREAM_FEATURE_DOC
        "skippable: [batch]. By drift: whether the score is below the threshold. At random: "
        "true with the share's probability, determined by the seed and the input's number.\n"
        "score: [batch]. Skip scores, in the drift's unit.\n"
        "observe: Whether the inputs enter the window's sample and counts.\n");

REGISTER_OP("SlipstreamClassifierSetDrift")
    .Input("handle: resource")
    .Input("tables: int32")
    .Input("keys: int64")
    .Input("drift: float")
    .SetIsStateful()
    .SetShapeFn(SetDriftShape)
    .Doc(R"doc(
Replaces the drifts of all tracked keys.

handle: Of the classifier.
tables: [n]. Index of each key's table.
keys: [n]. No key of a table may occur twice.
drift: [n]. At least 0. A key whose drift is not finite is not tracked: it is below no threshold.
)doc");

REGISTER_OP("SlipstreamClassifierConfigure")
    .Input("handle: resource")
    .Input("threshold: float")
    .Input("random_share: double")
    .Attr("mode: {'none', 'drift', 'random'}")
    .SetIsStateful()
    .SetShapeFn(AllScalarInputs)
    .Doc(R"doc(
Sets what is skippable from the next batch on.

handle: Of the classifier.
threshold: At least 0. Read by `drift`: inputs with a lower skip score are skippable.
random_share: 0 to 1. Read by `random`: the probability of an input to be skippable.
mode: `none`: nothing is skippable.
)doc");

REGISTER_OP("SlipstreamClassifierReservoirScores")
    .Input("handle: resource")
    .Output("scores: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      TF_RETURN_IF_ERROR(AllScalarInputs(c));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Skip scores of the sampled inputs of this window under the current drifts.

handle: Of the classifier.
scores: [sampled inputs]. +inf for an input that is not hot.
)doc");

REGISTER_OP("SlipstreamClassifierEndWindow")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      TF_RETURN_IF_ERROR(AllScalarInputs(c));
      c->set_output(0, c->Vector(3));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns the window's counts and starts the next window with an empty sample.

handle: Of the classifier.
counts: [3]. Inputs seen, inputs skippable, hot inputs (those with a finite skip score).
)doc");

}  // namespace slipstream
