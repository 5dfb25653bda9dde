// Registrations of the ops of the classifier's pilot, which foresees inputs' losses.
#include "cc_ops/tf/base/shapes.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status ForeseeShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
  for (int i = 1; i <= 3; ++i) {
    TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - i), 1, &unused));
  }
  const ShapeHandle kept = c->Vector(c->UnknownDim());
  for (int i = 0; i < 4; ++i) c->set_output(i, kept);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("SlipstreamForeseeInputs")
    .Input("handle: resource")  //
    SLIPSTREAM_FEATURE_INPUTS.Input("labels: float")
    .Input("sample_weights: float")
    .Input("predictions: float")
    .Output("rows: int64")
    .Output("correction: float")
    .Output("offset: float")
    .Output("skippable: bool")
    .SetIsStateful()
    .SetShapeFn(ForeseeShape)
    .Doc(
        "Tells which inputs of a batch are kept by their foreseen losses.\n\n"
        "An input's score is |label - prediction|. It is kept if that is not below the threshold, "
        "else with probability max(keep_rate, score / threshold), determined by the seed and the "
        "input's number. The pilot learns from each input that is kept, before the next one.\n\n"
        "handle: Of the classifier.\n"  //
        SLIPSTREAM_FEATURE_DOC
        "  A feature of table num_tables is ignored.\n"
        "labels: [batch]. 0 to 1.\n"
        "sample_weights: [batch], or [0]: all are 1. Of the inputs, at least 0; by them the pilot "
        "learns.\n"
        "predictions: [batch] probabilities, where the pilot is the model; else [0].\n"
        "rows: [kept]. Of the batch, ascending.\n"
        "correction: [kept]. Inputs that each one stands for: 1 / its probability to be kept.\n"
        "offset: [kept]. Log of its probability to be kept with label 1, less the same with label "
        "0.\n"
        "skippable: [kept]. Whether it could have been left out.\n");

REGISTER_OP("SlipstreamClassifierExportPilot")
    .Input("handle: resource")
    .Output("base: double")
    .Output("buckets: int64")
    .Output("numbers: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [2], [n], [n, w]"))
    .Doc(R"doc(
What the classifier's pilot has learnt.

handle: Of the classifier.
base: [2]. Base rate, and steps that it is the mean of.
buckets: [n]. Those that something was learnt in, ascending.
numbers: [n, width]. Factors, number, accumulators of each.
)doc");

REGISTER_OP("SlipstreamClassifierImportPilot")
    .Input("handle: resource")
    .Input("base: double")
    .Input("buckets: int64")
    .Input("numbers: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [2], [n], [n, ?]"))
    .Doc(R"doc(
Replaces what the classifier's pilot has learnt; the arrays are those of SlipstreamClassifierExportPilot.

handle: Of the classifier.
base: [2].
buckets: [n].
numbers: [n, width].
)doc");

}  // namespace slipstream
