// Registration of the input classifier's ops (Slipstream, arXiv 2404.04270, input classifier
// block).
#include "cc_ops/tf/base/shapes.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Ranks of the keys and row splits; the batch size, where a feature's layout tells it.
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
Creates an input classifier; it lives until the last copy of its handle is gone.

It has the drifts of the tracked keys, a threshold, a uniform sample of the window's inputs and
counts. At first no key is tracked and nothing is skipped.

alpha: Share of an input's lookups that must be saturated: above 0, at most 1. An input (of type
  double: in float32, ceil(0.6 * 10) is 7) rather than an attribute.
handle: The new classifier.
num_tables: Number of tables; keys of different tables are different keys.
reservoir_size: Most inputs in the sample.
seed: Seeds the sample, thinning and random skipping.
pilot: What foresees the inputs' losses: the base rate, a linear model or a factorisation machine of
  their keys, or the model that is trained.
pilot_factors: Of `fm`: numbers of a key's factor, 1 to 8.
pilot_memory_bytes: Of `linear` and `fm`: for what is learnt of the keys, 1,024 or more.
)doc");

REGISTER_OP("SlipstreamClassifyInputs")
    .Input("handle: resource")  //
    SLIPSTREAM_FEATURE_INPUTS.Output("skippable: bool")
    .Output("score: float")
    .Output("weight: float")
    .Attr("observe: bool = true")
    .Attr("window_batches: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(ClassifyShape)
    .Doc(
        "Tells which inputs of a batch can be skipped.\n\n"
        "The skip score of an input with m lookups is its ceil(alpha * m)-th smallest drift, "
        "untracked keys counting as +inf; +inf for an input without lookups.\n\n"
        "handle: Of the classifier.\n"  //
        SLIPSTREAM_FEATURE_DOC
        "  A feature of table num_tables is ignored.\n"
        "skippable: [batch]. By drift: whether the score is below the threshold. At random: true "
        "with the share's probability, determined by the seed and the input's number.\n"
        "score: [batch]. Skip scores, in the drift's unit.\n"
        "weight: [batch]. 0: the input is left out. Else the inputs that it stands for: 1, or 1 / "
        "keep_rate for a skippable one that is kept.\n"
        "observe: Whether the inputs enter the window's sample and counts.\n"
        "window_batches: Batches of a window, or 0. Where inputs are observed and nothing may be "
        "left out (shadow mode, or mode none), as many batches as the sample needs are classified, "
        "one in 16 at least, and count for the others, whose inputs are not skippable.\n");

REGISTER_OP("SlipstreamClassifierSetDrift")
    .Input("handle: resource")
    .Input("tables: int32")
    .Input("keys: int64")
    .Input("drift: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n], [n]"))
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
    .Input("keep_rate: double")
    .Attr("mode: {'none', 'drift', 'foreseen_loss', 'random'}")
    .Attr("is_shadow: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], [], []"))
    .Doc(R"doc(
Sets what is skippable from the next batch on.

handle: Of the classifier.
threshold: At least 0. Read by `drift` and `foreseen_loss`: inputs with a lower skip score are
  skippable.
random_share: 0 to 1. Read by `random`: the probability of an input to be skippable.
keep_rate: 0 to below 1. Share of the skippable inputs that is kept, with a weight; not `random`.
  By `foreseen_loss` above 0: the least probability of an input; else it is score / threshold.
mode: `none`: nothing is skippable.
is_shadow: All inputs are kept, with weight 1.
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
Takes in the losses of a batch's inputs: adds them to the window's statistics.

handle: Of the classifier.
losses: [batch]. Binary cross-entropy of each input before it is trained on. Those that are not
  finite are only counted.
labels: [batch]. 0.5 or more is positive.
skippable: [batch]. Whether the input could have been skipped.
weights: [batch], or [0]: all are 1. Inputs that each one stands for.
)doc");

REGISTER_OP("SlipstreamClassifierTakeLossStatistics")
    .Input("handle: resource")
    .Output("sums: double")
    .Output("histogram: double")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [6], [2, 511]"))
    .Doc(R"doc(
Returns the statistics of the losses recorded since the last call.

handle: Of the classifier.
sums: [6]. Count and sum of squared residuals (1 - exp(-loss))^2 of skippable inputs; sum of the
  weights, weighted sum of the losses and weighted sum of the squared residuals of all inputs;
  losses that were not finite.
histogram: [2, bins]. Weights of the inputs by label and predicted probability.
)doc");

REGISTER_OP("SlipstreamClassifierReservoirLosses")
    .Input("handle: resource")
    .Output("losses: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n]"))
    .Doc(R"doc(
Scores by foreseen loss of the sampled inputs of this window.

handle: Of the classifier.
losses: [sampled inputs with one].
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
What has come in since the window began, and where random choices are; all of it stays.

handle: Of the classifier.
sums: [6], as SlipstreamClassifierTakeLossStatistics gives them; and
histogram: [2, bins].
numbers: [8]. The window's counts, as SlipstreamClassifierEndWindow gives them; inputs observed
  since the start; inputs offered to the sample since the start and in this window.
tables: [lookups] of the sampled inputs.
keys: [lookups].
ends: [sampled inputs], of their lookups.
losses: [sampled inputs], their scores by foreseen loss; NaN: none.
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
Replaces what SlipstreamClassifierExportWindow gives; all or nothing.

handle: Of the classifier.
sums: [6].
histogram: [2, bins].
numbers: [8].
tables: [lookups].
keys: [lookups].
ends: [sampled inputs].
losses: [sampled inputs].
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
Skip scores of the sampled inputs of this window, if the drifts of keys were these.

The drifts that SlipstreamClassifierSetDrift set do not count, and stay.

handle: Of the classifier.
tables: [n]. Index of each key's table.
keys: [n]. Each key of a table once; those that no sampled input has make no difference.
drift: [n]. At least 0. A key whose drift is not finite counts as not tracked.
scores: [sampled inputs]. +inf for an input that is not hot.
)doc");

REGISTER_OP("SlipstreamClassifierEndWindow")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [5]"))
    .Doc(R"doc(
Returns the window's counts and starts the next window with an empty sample.

handle: Of the classifier.
counts: [5]. Inputs seen; left out; hot (with a finite skip score); skippable; kept though
  skippable, by thinning.
)doc");

}  // namespace slipstream
