// Registrations of lookups and of the update after a lookup.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc_ops/tf/base/shapes.h"
#include "cc_ops/tf/lookup/lookup_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;
using tf::shape_inference::DimensionHandle;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

// Number of key positions of a feature: all elements of a matrix, or one per example for a column.
absl::Status KeysOf(InferenceContext* c, ShapeHandle keys, int column, DimensionHandle* count) {
  *count = c->UnknownDim();
  if (!c->RankKnown(keys)) return absl::OkStatus();
  *count = c->Dim(keys, 0);
  const bool is_matrix = c->Rank(keys) == 2 && column < 0;
  return is_matrix ? c->Multiply(*count, c->Dim(keys, 1), count) : absl::OkStatus();
}

}  // namespace

absl::Status LookupShape(InferenceContext* c) {
  int num_tables = 0, num_keys = 0, num_splits = 0;
  bool is_stacked = false;
  std::vector<int> feature_keys, feature_column, feature_splits, feature_table, dims;
  std::vector<std::string> combiners;
  TF_RETURN_IF_ERROR(c->GetAttr("num_tables", &num_tables));
  TF_RETURN_IF_ERROR(c->GetAttr("num_keys", &num_keys));
  TF_RETURN_IF_ERROR(c->GetAttr("num_splits", &num_splits));
  TF_RETURN_IF_ERROR(c->GetAttr("is_stacked", &is_stacked));
  TF_RETURN_IF_ERROR(c->GetAttr("feature_keys", &feature_keys));
  TF_RETURN_IF_ERROR(c->GetAttr("feature_column", &feature_column));
  TF_RETURN_IF_ERROR(c->GetAttr("feature_splits", &feature_splits));
  TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
  TF_RETURN_IF_ERROR(c->GetAttr("feature_table", &feature_table));
  TF_RETURN_IF_ERROR(c->GetAttr("table_dims", &dims));
  ShapeHandle shape;
  for (int i = 0; i < num_tables; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &shape));
  const size_t num_features = feature_keys.size();
  if (feature_column.size() != num_features || feature_splits.size() != num_features ||
      feature_table.size() != num_features || combiners.size() != num_features ||
      dims.size() != static_cast<size_t>(num_tables)) {
    return absl::InvalidArgumentError(
        "attributes differ in length; expected one entry per feature in combiners and the "
        "feature_* lists, and one entry per handle in table_dims");
  }
  DimensionHandle batch = c->UnknownDim();
  for (size_t f = 0; f < num_features; ++f) {
    if (feature_keys[f] < 0 || feature_keys[f] >= num_keys || feature_splits[f] >= num_splits ||
        feature_table[f] < 0 || feature_table[f] >= num_tables) {
      return absl::InvalidArgumentError(
          absl::StrCat("feature_keys, feature_splits or feature_table of feature ", f,
                       " is out of range; expected an index of an input of the op"));
    }
    if (feature_splits[f] >= 0) {
      TF_RETURN_IF_ERROR(
          c->WithRank(c->input(num_tables + num_keys + feature_splits[f]), 1, &shape));
      DimensionHandle examples;
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(shape, 0), 1, &examples));
      TF_RETURN_IF_ERROR(c->Merge(batch, examples, &batch));
    } else {
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(num_tables + feature_keys[f]), 1, &shape));
      TF_RETURN_IF_ERROR(c->WithRankAtMost(shape, 2, &shape));
      if (c->RankKnown(shape)) TF_RETURN_IF_ERROR(c->Merge(batch, c->Dim(shape, 0), &batch));
    }
  }
  int num_outputs = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("num_outputs", &num_outputs));
  if (is_stacked) {
    if (num_outputs != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("num_outputs is ", num_outputs, "; expected 1 if is_stacked"));
    }
    for (int table : feature_table) {
      if (dims[table] != dims[feature_table[0]]) {
        return absl::InvalidArgumentError(absl::StrCat("tables have dims ", dims[feature_table[0]],
                                                       " and ", dims[table],
                                                       "; expected equal dims if is_stacked"));
      }
    }
    c->set_output(0, c->MakeShape({batch, c->MakeDim(static_cast<int64_t>(num_features)),
                                   c->MakeDim(dims[feature_table[0]])}));
  } else {
    if (num_outputs != static_cast<int>(num_features)) {
      return absl::InvalidArgumentError(absl::StrCat("num_outputs is ", num_outputs, "; expected ",
                                                     num_features, ", the number of features"));
    }
    for (size_t f = 0; f < num_features; ++f) {
      DimensionHandle examples = batch;
      if (combiners[f] == "none")
        TF_RETURN_IF_ERROR(
            KeysOf(c, c->input(num_tables + feature_keys[f]), feature_column[f], &examples));
      c->set_output(static_cast<int>(f), c->Matrix(examples, c->MakeDim(dims[feature_table[f]])));
    }
  }
  if (c->num_outputs() > num_outputs) c->set_output(num_outputs, c->Scalar());  // the plan
  return absl::OkStatus();
}

REGISTER_OP("SlipstreamLookup")
    .Input("handles: num_tables * resource") SLIPSTREAM_FEATURE_INPUTS SLIPSTREAM_LOOKUP_ATTRS
    .Attr("joins_step: bool = false")
    .Output("pooled: num_outputs * float")
    .Output("plan: variant")
    .SetIsStateful()
    .SetShapeFn(LookupShape)
    .Doc(
        "Looks up the keys of a training batch. Creates missing rows and counts accesses.\n"
        "\n"
        "A key that has too few accesses for a row (admit_after) has its initial values.\n"
        "\n"
        "plan: Scalar. Input of SlipstreamApplyGradients or "
        "SlipstreamCollectGradients.\n"
        "joins_step: Whether the lookup belongs to the training step of earlier lookups, if the "
        "tables were not updated since. Then it does not count in the age of "
        "rows.\n" SLIPSTREAM_LOOKUP_DOC);

REGISTER_OP("SlipstreamTableCountAccesses")
    .Input("handles: num_tables * resource") SLIPSTREAM_FEATURE_INPUTS.Attr("num_tables: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc(
        "Counts the accesses of a training batch and creates missing rows, without a lookup.\n"
        "\n"
        "handles: Scalars. The tables, each once.\n" SLIPSTREAM_FEATURE_DOC);

REGISTER_OP("SlipstreamEvaluationLookup")
    .Input("handles: num_tables * resource") SLIPSTREAM_FEATURE_INPUTS SLIPSTREAM_LOOKUP_ATTRS
    .Output("pooled: num_outputs * float")
    .SetIsStateful()
    .SetShapeFn(LookupShape)
    .Doc(
        "Looks up keys without creating rows or counting accesses.\n"
        "\n"
        "A key without a row has its initial values. Deferred gradients are applied first, so that"
        " the rows contain every gradient, unless the table's policy sets is_exchanged.\n"
        "\n" SLIPSTREAM_LOOKUP_DOC);

REGISTER_OP("SlipstreamApplyGradients")
    .Input("plan: variant")
    .Input("gradients: num_gradients * float")
    .Input("handles: num_tables * resource")
    .Input("learning_rate: float")
    .Attr("num_gradients: int >= 0")
    .Attr("num_tables: int >= 0")
    .Attr("advice: string = ''")
    .SetIsStateful()
    .SetShapeFn(Shapes("[*]"))
    .Doc(R"doc(
Sums the gradients of each key and updates its row once.

The gradients are added in the order of the batch, so that the result does not depend on the number
of threads. The update policy of a table may mask or defer the sum instead (SlipstreamTableSetPolicy). Keys that
have lost their row since the lookup are skipped and counted.

plan: Scalar, from SlipstreamLookup. Or a sum from SlipstreamRowGradients; then all its lookups are
  one update, and gradients is empty.
gradients: The gradients of the pooled outputs of the lookup, in their shapes. All values must be
  finite, otherwise no row changes.
handles: The tables, or none. They order the op between the lookups of a graph.
advice: If not empty, an error is returned if a table was updated after one of the lookups in plan.
  The error ends with this text.
learning_rate: Scalar for all tables, or [tables] in the order of the lookup's handles.
)doc");

}  // namespace slipstream
