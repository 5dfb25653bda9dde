// Registrations of the ops of the classifier's pilot, which predicts the losses of examples.
#include "cc_ops/tf/base/shapes.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status SubsampleShape(InferenceContext* c) {
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

REGISTER_OP("SlipstreamSubsampleInputs")
    .Input("handle: resource")  //
    SLIPSTREAM_FEATURE_INPUTS.Input("labels: float")
    .Input("sample_weights: float")
    .Input("predictions: float")
    .Output("rows: int64")
    .Output("correction: float")
    .Output("offset: float")
    .Output("skippable: bool")
    .SetIsStateful()
    .SetShapeFn(SubsampleShape)
    .Doc(
        "Decides which examples of a batch to keep, by the losses that the pilot predicts.\n"
        "\n"
        "The score of an example is |label - prediction|. In mode predicted_loss, the example is"
        " kept if the score is at least the threshold, and otherwise with probability "
        "max(keep_rate, score / threshold). The random numbers depend on the seed and the number"
        " of the example since the start. The pilot is trained on the kept examples, once per "
        "1024 examples and at the end of the batch. Features whose feature_table is the "
        "classifier's num_tables are ignored.\n"
        "\n"
        "handle: Scalar. The classifier. It must have a pilot.\n" SLIPSTREAM_FEATURE_DOC
        "labels: [batch]. 0 to 1.\n"
        "sample_weights: [batch], at least 0, or [0] if all are 1. Weights for training the "
        "pilot.\n"
        "predictions: [batch]. Probabilities of the trained model if it is the pilot; "
        "otherwise [0].\n"
        "rows: [kept]. Positions of the kept examples in the batch, ascending. All examples in a "
        "dry run.\n"
        "correction: [kept]. Number of examples that each one represents: 1 / its keep "
        "probability; 1 in a dry run.\n"
        "offset: [kept]. Log of the keep probability that the example has with label 1, minus "
        "the log of the keep probability with label 0; 0 in a dry run.\n"
        "skippable: [kept]. Whether the example could have been dropped.\n");

REGISTER_OP("SlipstreamClassifierExportPilot")
    .Input("handle: resource")
    .Output("base: double")
    .Output("buckets: int64")
    .Output("numbers: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [2], [n], [n, w]"))
    .Doc(R"doc(
Returns the state of the classifier's pilot.

handle: Scalar. The classifier.
base: [2]. Base rate of the label, which is a running mean over steps, and the number of its steps,
  at most 1000.
buckets: [n]. Indices of the trained buckets, ascending. A bucket has the parameters of the keys
  with one hash.
numbers: [n, width]. Parameters of each bucket: the factor, the weight and their Adagrad
  accumulators.
)doc");

REGISTER_OP("SlipstreamClassifierImportPilot")
    .Input("handle: resource")
    .Input("base: double")
    .Input("buckets: int64")
    .Input("numbers: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [2], [n], [n, ?]"))
    .Doc(R"doc(
Replaces the state of the classifier's pilot with outputs of SlipstreamClassifierExportPilot.

handle: Scalar. The classifier.
base: [2]. Output `base` of SlipstreamClassifierExportPilot.
buckets: [n]. Output `buckets` of the same op.
numbers: [n, width]. Output `numbers` of the same op.
)doc");

}  // namespace slipstream
