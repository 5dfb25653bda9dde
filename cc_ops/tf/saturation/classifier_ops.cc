// Registrations of the classifier's ops (Slipstream, arXiv 2404.04270, input classifier).
#include "cc_ops/tf/base/shapes.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Checks the ranks of keys and row splits, and finds the batch size if the layout of a feature
// determines it.
absl::Status BatchOfFeatures(InferenceContext* c, DimensionHandle* result) {
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
    // A vector may be flat keys with row splits. A matrix has one row per example.
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
  *result = batch;
  return absl::OkStatus();
}

absl::Status ClassifyShape(InferenceContext* c) {
  DimensionHandle batch;
  TF_RETURN_IF_ERROR(BatchOfFeatures(c, &batch));
  for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(batch));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("SlipstreamClassifier")
    .Input("alpha: double")
    .Output("handle: resource")
    .Attr("num_tables: int >= 1")
    .Attr("reservoir_size: int >= 1 = 8192")
    .Attr("seed: int = 0")
    .Attr("pilot: {'none', 'label', 'linear', 'fm', 'model'} = 'none'")
    .Attr("pilot_factors: int = 8")
    .Attr("pilot_memory_bytes: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> []"))
    .Doc(R"doc(
Creates a classifier that decides which examples of a batch can be dropped.

The classifier stores the drifts of tracked keys, a threshold, a uniform sample of the examples of
the window, and counts. At first no key is tracked and every example is kept. It is deleted with the
last copy of its handle. Source: Slipstream, arXiv 2404.04270, input classifier.

alpha: Scalar, above 0, at most 1. Fraction of an example's lookups that must be saturated. It is an
  input of type double because an attribute is a float32, in which ceil(0.6 * 10) is 7.
handle: Scalar. The new classifier.
num_tables: Number of tables. Equal keys of different tables are different keys.
reservoir_size: Maximum number of examples in the sample.
seed: Seeds the sample, subsampling and random dropping.
pilot: Model that predicts the losses of examples. `none`: no model. `label`: the base rate of the
  label. `linear`: logistic regression on the keys. `fm`: a factorization machine of the keys.
  `model`: the trained model, whose predictions the caller passes to SlipstreamSubsampleInputs.
pilot_factors: For `fm`: number of values of a key's factor, 1 to 8.
pilot_memory_bytes: For `linear` and `fm`: memory of the pilot, at least 1,024 bytes.
)doc");

REGISTER_OP("SlipstreamClassifyInputs")
    .Input("handle: resource")  //
    SLIPSTREAM_FEATURE_INPUTS.Output("skippable: bool")
    .Output("score: float")
    .Output("weight: float")
    .Attr("observe: bool = true")
    .Attr("window_batches: int >= 0 = 0")
    .Attr("stride: int >= 1 = 1")
    .SetIsStateful()
    .SetShapeFn(ClassifyShape)
    .Doc(
        "Decides which examples of a batch can be dropped, by drift or at random.\n"
        "\n"
        "The score of an example with m lookups is its ceil(alpha * m)-th smallest drift, "
        "where keys without a drift count as +inf. Without lookups it is +inf. Features whose "
        "feature_table is the classifier's num_tables are ignored. In mode predicted_loss, use "
        "SlipstreamSubsampleInputs instead.\n"
        "\n"
        "handle: Scalar. The classifier.\n" SLIPSTREAM_FEATURE_DOC
        "skippable: [batch]. Whether the example can be dropped. Mode drift: the score is below "
        "the threshold. Mode random: true with probability random_fraction; the random numbers "
        "depend on the seed and the number of the example since the start. Mode none: false.\n"
        "score: [batch]. In the unit of the drift.\n"
        "weight: [batch]. 0 drops the example. Otherwise the number of examples that it "
        "represents: 1, or 1 / keep_rate for a droppable example that is kept. Always 1 in a dry "
        "run.\n"
        "observe: Whether the examples are added to the sample and the counts of the window.\n"
        "window_batches: Number of batches of a window, or 0. If examples are observed and "
        "none may be dropped (a dry run, or mode none), only the batches that the sample "
        "needs are classified, at least 1 in 16. Their counts represent the other batches, "
        "whose examples get the score +inf and are not droppable. 0 classifies all batches.\n"
        "stride: If examples are observed, one random example of each `stride` consecutive ones "
        "is classified, and represents the others as above. The choice depends on the seed and "
        "the number of the example since the start.\n");

REGISTER_OP("SlipstreamClassifierSetDrift")
    .Input("handle: resource")
    .Input("tables: int32")
    .Input("keys: int64")
    .Input("drift: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n], [n]"))
    .Doc(R"doc(
Replaces the drifts of all tracked keys.

handle: Scalar. The classifier.
tables: [n]. Index of each key's table.
keys: [n]. Each key of a table at most once.
drift: [n]. At least 0. A key whose drift is not finite is not tracked, because it is below no
  threshold.
)doc");

REGISTER_OP("SlipstreamClassifierConfigure")
    .Input("handle: resource")
    .Input("threshold: float")
    .Input("random_fraction: double")
    .Input("keep_rate: double")
    .Attr("mode: {'none', 'drift', 'predicted_loss', 'random'}")
    .Attr("is_shadow: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], [], []"))
    .Doc(R"doc(
Sets which examples can be dropped from the next batch on.

handle: Scalar. The classifier.
threshold: Scalar, at least 0. Modes `drift` and `predicted_loss`: examples with a lower score can be
  dropped.
random_fraction: Scalar, 0 to 1. Mode `random`: probability that an example can be dropped.
keep_rate: Scalar, 0 to below 1. Mode `drift`: probability that a droppable example is kept, with
  weight 1 / keep_rate. Mode `predicted_loss`, which requires a value above 0: a droppable example is
  kept with probability max(keep_rate, score / threshold). Mode `random` ignores it and keeps none.
mode: Rule by which examples can be dropped. `none`: no example. `drift`: saturated keys.
  `predicted_loss`: a small loss predicted by the pilot, which the classifier must have. `random`: a
  random choice, for comparison.
is_shadow: Whether all examples are kept with weight 1, for a dry run.
)doc");

REGISTER_OP("SlipstreamRecordLosses")
    .Input("handle: resource")
    .Input("losses: float")
    .Input("labels: float")
    .Input("skippable: bool")
    .Input("weights: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [batch], [batch], [batch], [?]"))
    .Doc(R"doc(
Adds the losses of a batch to the statistics of the window.

handle: Scalar. The classifier.
losses: [batch]. Binary cross-entropy of each example before the model trains on it. Losses that are
  not finite are only counted.
labels: [batch]. A label of 0.5 or more is positive.
skippable: [batch]. Whether each example could have been dropped.
weights: [batch], or [0] if all are 1. Number of examples that each one represents.
)doc");

REGISTER_OP("SlipstreamClassifierTakeLossStatistics")
    .Input("handle: resource")
    .Output("sums: double")
    .Output("histogram: double")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [6], [2, 511]"))
    .Doc(R"doc(
Returns the statistics of the losses since the last run of this op, and resets them.

A residual is 1 - exp(-loss), which is |label - prediction| for labels of 0 and 1.

handle: Scalar. The classifier.
sums: [6]. Number of examples that could have been dropped, and the sum of their squared residuals;
  over all examples, the sum of weights, of weighted losses, and of weighted squared residuals;
  number of losses that were not finite.
histogram: [2, 511]. Sums of weights by label (row 0: negative, row 1: positive) and by predicted
  probability, in bins of equal width from 0 to 1.
)doc");

REGISTER_OP("SlipstreamClassifierReservoirLosses")
    .Input("handle: resource")
    .Output("losses: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n]"))
    .Doc(R"doc(
Returns the predicted losses of the sampled examples of the window.

handle: Scalar. The classifier.
losses: [n]. |label - prediction| of each sampled example that a pilot has predicted.
)doc");

REGISTER_OP("SlipstreamClassifierExportWindow")
    .Input("handle: resource")
    .Output("sums: double")
    .Output("histogram: double")
    .Output("numbers: int64")
    .Output("tables: int32")
    .Output("keys: int64")
    .Output("ends: int64")
    .Output("losses: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [6], [2, 511], [8], [lookups], [lookups], [inputs], [inputs]"))
    .Doc(R"doc(
Returns the state of the current window, without resetting it.

The state includes the positions in the sequences of random numbers.

handle: Scalar. The classifier.
sums: [6]. As in SlipstreamClassifierTakeLossStatistics.
histogram: [2, 511]. As in SlipstreamClassifierTakeLossStatistics.
numbers: [8]. The 5 counts of SlipstreamClassifierEndWindow; examples observed since the start;
  examples offered to the sample since the start; examples offered to the sample in this window.
tables: [lookups]. Table index of each lookup of the sampled examples.
keys: [lookups]. The key of each lookup.
ends: [sampled examples]. End of the lookups of each example in `tables` and `keys`.
losses: [sampled examples]. |label - prediction| of the pilot; NaN if there is none.
)doc");

REGISTER_OP("SlipstreamClassifierImportWindow")
    .Input("handle: resource")
    .Input("sums: double")
    .Input("histogram: double")
    .Input("numbers: int64")
    .Input("tables: int32")
    .Input("keys: int64")
    .Input("ends: int64")
    .Input("losses: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [?], [?, ?], [?], [?], [?], [?], [?]"))
    .Doc(R"doc(
Replaces the state of the current window. After an error nothing has changed.

The inputs are the outputs of SlipstreamClassifierExportWindow.

handle: Scalar. The classifier.
sums: [6].
histogram: [2, 511].
numbers: [8].
tables: [lookups].
keys: [lookups].
ends: [sampled examples].
losses: [sampled examples].
)doc");

REGISTER_OP("SlipstreamClassifierReservoirScores")
    .Input("handle: resource")
    .Input("tables: int32")
    .Input("keys: int64")
    .Input("drift: float")
    .Output("scores: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n], [n] -> [inputs]"))
    .Doc(R"doc(
Computes the scores of the sampled examples of the window for the given drifts.

The drifts of SlipstreamClassifierSetDrift are neither read nor changed.

handle: Scalar. The classifier.
tables: [n]. Index of each key's table.
keys: [n]. Each key of a table at most once. Keys without a sampled example have no effect.
drift: [n]. At least 0. A key whose drift is not finite counts as not tracked.
scores: [sampled examples]. As `score` of SlipstreamClassifyInputs; +inf if too few keys of the
  example are tracked.
)doc");

REGISTER_OP("SlipstreamClassifierEndWindow")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [5]"))
    .Doc(R"doc(
Returns the counts of the window, and starts the next window with an empty sample.

handle: Scalar. The classifier.
counts: [5]. Examples observed; examples dropped; examples with a finite score; examples that could
  be dropped; of these, examples that subsampling keeps or, in a dry run, would keep. The last three
  are estimates if SlipstreamClassifyInputs did not classify all batches.
)doc");

}  // namespace slipstream
