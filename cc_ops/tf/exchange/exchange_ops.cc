// Registrations of the ops that collect gradient rows for other processes and apply theirs.
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;
using tf::shape_inference::DimensionHandle;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

// sizes [ranks, tables], keys [n], values [m].
absl::Status BufferShape(InferenceContext* c) {
  int ranks = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
  c->set_output(0, c->Matrix(ranks, InferenceContext::kUnknownDim));
  c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

}  // namespace

#define SLIPSTREAM_SEND_BUFFER_DOC                                                     \
  "sizes: [ranks, tables], rows for each rank; with ranks = 1 all rows are for all.\n" \
  "keys: [n], by rank, then by table; each once.\n"                                    \
  "values: their rows behind each other, each as wide as its table.\n"                 \
  "ranks: how many ranks own the keys, by hash.\n"

REGISTER_OP("SlipstreamCollectGradients")
    .Input("plan: variant")
    .Input("gradients: num_gradients * float")
    .Input("learning_rate: float")
    .Attr("num_gradients: int >= 1")
    .Attr("ranks: int >= 1 = 1")
    .Attr("counts_update: bool = false")
    .Output("sizes: int64")
    .Output("keys: int64")
    .Output("values: float")
    .SetIsStateful()
    .SetShapeFn(BufferShape)
    .Doc(
        "Sums the gradients of each key and gives out what the tables' policies let go: the sums "
        "themselves, or held ones that are due. No row changes.\n\n"
        "plan: scalar, from SlipstreamLookup.\n"
        "gradients: of its pooled outputs, in their shapes; all must be finite.\n"
        "learning_rate: scalar.\n" SLIPSTREAM_SEND_BUFFER_DOC
        "counts_update: whether this is an update of the tables; else applying the rows to them "
        "is.\n");

REGISTER_OP("SlipstreamCollectHeld")
    .Input("handles: num_tables * resource")
    .Attr("num_tables: int >= 1")
    .Attr("ranks: int >= 1 = 1")
    .Output("sizes: int64")
    .Output("keys: int64")
    .Output("values: float")
    .SetIsStateful()
    .SetShapeFn(BufferShape)
    .Doc(
        "Gives out every gradient sum that the tables hold; they hold none then.\n\n"
        "handles: scalars.\n" SLIPSTREAM_SEND_BUFFER_DOC);

REGISTER_OP("SlipstreamApplyRows")
    .Input("handles: num_tables * resource")
    .Input("sizes: int64")
    .Input("keys: int64")
    .Input("values: float")
    .Input("learning_rate: float")
    .Attr("num_tables: int >= 1")
    .Attr("scale: float = 1.0")
    .Attr("makes_rows: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle unused;
      const int first = c->num_inputs() - 4;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 2, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(first + 1), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(first + 2), 1, &unused));
      return c->WithRank(c->input(first + 3), 0, &unused);
    })
    .Doc(R"doc(
Adds the gradient rows of each key, in the order given, and applies its table's rule once.

handles: scalars.
sizes: [ranks, tables], rows from each rank.
keys: [n], by rank, then by table.
values: their rows behind each other, each as wide as its table; all must be finite.
learning_rate: scalar.
scale: multiplies the sums.
makes_rows: whether keys without a row get one; else their gradients are dropped, and counted.
)doc");

REGISTER_OP("SlipstreamRouteKeys")
    .Input("handles: num_tables * resource") SLIPSTREAM_FEATURE_INPUTS.Attr("num_tables: int >= 1")
    .Attr("ranks: int >= 1")
    .Attr("reads_frozen: bool = true")
    .Attr("keeps: bool = false")
    .Output("request_sizes: int64")
    .Output("requests: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      int ranks = 0, num_tables = 0;
      bool refreshed = false;
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
      TF_RETURN_IF_ERROR(c->GetAttr("num_tables", &num_tables));
      TF_RETURN_IF_ERROR(c->GetAttr("keeps", &refreshed));
      c->set_output(0, c->Matrix(ranks, int64_t{num_tables} * (refreshed ? 2 : 1)));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(
        "Finds the distinct keys of a batch that must be asked for, by owner.\n\n"
        "handles: scalars, of the tables of copies that the batch will be looked up in.\n"
        "ranks: how many ranks own the keys, by hash.\n"
        "reads_frozen: whether keys with a frozen copy are left out.\n"
        "keeps: whether keys with a kept copy stand apart.\n"
        "request_sizes: [ranks, tables], keys for each rank; where copies are kept [ranks, 2 * "
        "tables]: first those without one.\n"
        "requests: [n], by rank, then by table.\n" SLIPSTREAM_FEATURE_DOC);

REGISTER_OP("SlipstreamServeRows")
    .Input("handles: num_tables * resource")
    .Input("sizes: int64")
    .Input("keys: int64")
    .Input("with_summary: bool")
    .Input("rounds: bool")
    .Attr("num_tables: int >= 1")
    .Attr("makes_rows: bool = true")
    .Attr("keeps: bool = false")
    .Attr("own_rank: int >= -1 = -1")
    .Output("rows: uint8")
    .Output("rank_bytes: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 2), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 0, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads the rows of keys that ranks ask for.

handles: scalars.
sizes: [ranks, tables], keys of each rank.
keys: [n], by rank, then by table.
with_summary: scalar, whether a number for the slots, if a table has any, goes with each row.
rounds: scalar, whether values are rounded to bfloat16.
rows: the rows as bytes; those that are as they start are left out.
rank_bytes: [ranks], of these, the bytes for each rank.
makes_rows: whether keys without a row get one and each counts as accessed; else they give
  the rows that they would start with.
keeps: whether ranks keep copies of rows (see SlipstreamTablePublish); sizes are then
  [ranks, 2 * tables], the second half of keys whose copy the rank keeps.
own_rank: this one, which keeps no copies of its rows.
)doc");

REGISTER_OP("SlipstreamStoreCopies")
    .Input("handles: num_tables * resource")
    .Input("sizes: int64")
    .Input("keys: int64")
    .Input("rows: uint8")
    .Input("with_summary: bool")
    .Input("rounds: bool")
    .Attr("num_tables: int >= 1")
    .Attr("frozen: bool = false")
    .Attr("passed_over: int >= -1 = -1")
    .Attr("makes_room: bool = false")
    .Attr("keeps: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 2), 0, &unused));
      return c->WithRank(c->input(c->num_inputs() - 1), 0, &unused);
    })
    .Doc(R"doc(
Copies rows that were served into tables of copies.

handles: scalars.
sizes: [ranks, tables], rows from each rank.
keys: [n], by rank, then by table.
rows: from SlipstreamServeRows, those from rank 0 first.
with_summary: scalar, as they were served; without, the copies' slots are 0, beside which a
  movement is not underestimated.
rounds: scalar, as they were served.
frozen: whether the copies are read, without asking, until rows are marked anew.
passed_over: a rank whose rows are not copied; -1: none.
makes_room: whether bounded tables let rows go for them; else a lookup must follow.
keeps: whether they were served so; sizes are then [ranks, 2 * tables].
)doc");

}  // namespace slipstream
