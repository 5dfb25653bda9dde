// Registrations of the ops that exchange gradient rows and rows with other processes.
#include <cstdint>
#include <vector>

#include "cc_ops/tf/base/shapes.h"
#include "cc_ops/tf/exchange/row_dtype.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

using tensorflow::shape_inference::InferenceContext;

#define SLIPSTREAM_SEND_BUFFER_DOC                                                     \
  "sizes: [ranks, tables], rows for each rank; with ranks = 1 all rows are for all.\n" \
  "keys: [n], by rank, then by table; each once.\n"                                    \
  "values: their rows behind each other, each as wide as its table.\n"                 \
  "squares: [ranks, tables], the sum of these values squared.\n"                       \
  "ranks: how many ranks own the keys, by hash.\n"

REGISTER_OP("SlipstreamCollectGradients")
    .Input("plan: variant")
    .Input("gradients: num_gradients * float")
    .Input("learning_rate: float")
    .Attr("num_gradients: int >= 1")
    .Attr("ranks: int >= 1 = 1")
    .Attr("advance_step: bool = false")
    .Attr("passes_non_finite: bool = false")
    .Output("sizes: int64")
    .Output("keys: int64")
    .Output("values: float")
    .Output("squares: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[*] -> [ranks, tables], [n], [m], [ranks, tables]"))
    .Doc(
        "Sums the gradients of each key and gives out what the tables' policies do not defer: the "
        "sums themselves, or deferred ones that are due. No row changes.\n\n"
        "plan: scalar, from SlipstreamLookup.\n"
        "gradients: of its pooled outputs, in their shapes; all must be finite, or pass.\n"
        "learning_rate: a scalar for all tables, or [tables].\n" SLIPSTREAM_SEND_BUFFER_DOC
        "advance_step: whether this is an update of the tables; else applying the rows to them "
        "is.\n"
        "passes_non_finite: whether a gradient that is not finite is no error; all values are NaN "
        "then.\n");

REGISTER_OP("SlipstreamCollectDeferred")
    .Input("handles: num_tables * resource")
    .Attr("num_tables: int >= 1")
    .Attr("ranks: int >= 1 = 1")
    .Output("sizes: int64")
    .Output("keys: int64")
    .Output("values: float")
    .Output("squares: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> [ranks, tables], [n], [m], [ranks, tables]"))
    .Doc(
        "Gives out every deferred gradient of the tables, which have none then.\n\n"
        "handles: scalars.\n" SLIPSTREAM_SEND_BUFFER_DOC);

REGISTER_OP("SlipstreamApplyRows")
    .Input("handles: num_tables * resource")
    .Input("sizes: int64")
    .Input("keys: int64")
    .Input("values: float")
    .Input("learning_rate: float")
    .Input("scale: float")
    .Attr("num_tables: int >= 1")
    .Attr("create_missing: bool = true")
    .SetIsStateful()
    .SetShapeFn(Shapes("[ranks, tables], [n], [m], [*], [s]"))
    .Doc(R"doc(
Adds the gradient rows of each key, in the order given, and applies its table's rule once.

handles: scalars.
sizes: [ranks, tables], rows from each rank.
keys: [n], by rank, then by table.
values: their rows behind each other, each as wide as its table; all must be finite.
learning_rate: a scalar for all tables, or [tables].
scale: [tables], multiplies the sums; empty: they stay.
create_missing: whether keys without a row get one; else their gradients are dropped, and
  counted.
)doc");

REGISTER_OP("SlipstreamPackMessages")
    .Input("sizes: int64")
    .Input("keys: int64")
    .Input("values: float")
    .Input("wire_dtype: int32")
    .Attr("row_floats: list(int) >= 1")
    .Output("messages: uint8")
    .Output("lengths: int32")
    .SetShapeFn(Shapes("[ranks, tables], [n], [m], [] -> [bytes], [ranks]"))
    .Doc(
        "Puts sizes, keys and values for each rank in one piece, whose length changes seldom from "
        "call to call.\n\n"
        "sizes: [ranks, tables], rows for each rank.\n"
        "keys: [n], by rank, then by table.\n"
        "values: their rows behind each other, each as wide as its table.\n"
        "row_floats: [tables], values of a row; 0: keys come without.\n"
        "messages: to rank 0 first.\n"
        "lengths: [ranks], bytes of each.\n" SLIPSTREAM_WIRE_DTYPE_DOC
        "  Int8 values are chosen between the two nearest by chance, drawn from key and values.\n");

REGISTER_OP("SlipstreamUnpackMessages")
    .Input("messages: uint8")
    .Attr("ranks: int >= 1")
    .Attr("row_floats: list(int) >= 1")
    .Output("sizes: int64")
    .Output("keys: int64")
    .Output("values: float")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      int ranks = 0;
      std::vector<int64_t> row_floats;
      tensorflow::shape_inference::ShapeHandle messages;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &messages));
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
      TF_RETURN_IF_ERROR(c->GetAttr("row_floats", &row_floats));
      c->set_output(0, c->Matrix(ranks, static_cast<int64_t>(row_floats.size())));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gives what SlipstreamPackMessages of each rank put into its message to this one.

messages: of rank 0 first.
ranks: how many there are.
row_floats: [tables], as they were packed.
sizes: [ranks, tables], rows from each rank.
keys: [n], by rank, then by table.
values: their rows behind each other.
)doc");

REGISTER_OP("SlipstreamMergeRows")
    .Input("sizes: int64")
    .Input("keys: int64")
    .Input("values: float")
    .Attr("ranks: int >= 1")
    .Attr("row_floats: list(int) >= 1")
    .Output("merged_sizes: int64")
    .Output("merged_keys: int64")
    .Output("merged_values: float")
    .Output("squares: float")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      int ranks = 0;
      std::vector<int64_t> row_floats;
      tensorflow::shape_inference::ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &shape));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &shape));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &shape));
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
      TF_RETURN_IF_ERROR(c->GetAttr("row_floats", &row_floats));
      const auto parts = c->Matrix(ranks, static_cast<int64_t>(row_floats.size()));
      c->set_output(0, parts);
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(3, parts);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds up the rows of each key, in the order given, and puts the sums together by owner.

sizes: [parts, tables], rows of each part.
keys: [n], by part, then by table.
values: their rows behind each other, each as wide as its table.
ranks: how many own the keys, by hash.
row_floats: [tables], values of a row.
merged_sizes: [ranks, tables].
merged_keys: [m], each once; by rank, by table, ascending.
merged_values: their sums.
squares: [ranks, tables], the sum of these values squared.
)doc");

REGISTER_OP("SlipstreamPullRows")
    .Input("handles: num_tables * resource")
    .Input("sizes: int64")
    .Input("keys: int64")
    .Input("with_summary: bool")
    .Input("wire_dtype: int32")
    .Attr("num_tables: int >= 1")
    .Attr("create_missing: bool = true")
    .Output("messages: uint8")
    .Output("lengths: int32")
    .Output("row_bytes: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [] -> [bytes], [ranks], [ranks]"))
    .Doc(
        "Reads the rows of keys that ranks request.\n\n"
        "handles: scalars.\n"
        "sizes: [ranks, tables], keys of each rank.\n"
        "keys: [n], by rank, then by table.\n"
        "with_summary: scalar, whether a number for the slots, if a table has any, goes with each "
        "row.\n"
        "create_missing: whether keys without a row get one and each counts as accessed; else they "
        "give the rows that they would start with.\n"
        "messages: the rows, to rank 0 first; those that are as they start are left out. Their "
        "lengths change seldom from call to call.\n"
        "lengths: [ranks], bytes of each.\n"
        "row_bytes: [ranks], of these, the rows'.\n" SLIPSTREAM_WIRE_DTYPE_DOC);

REGISTER_OP("SlipstreamSortKeys")
    .Input("keys: N * int64")
    .Output("sorted: N * int64")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      for (int i = 0; i < c->num_inputs(); ++i) {
        tensorflow::shape_inference::ShapeHandle keys;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &keys));
        c->set_output(i, keys);
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sorts each list of keys.

keys: [n], for each list its own n.
sorted: [n]. Ascending.
)doc");

}  // namespace slipstream
