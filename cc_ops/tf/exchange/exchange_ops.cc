// Registrations of the ops that exchange rows and gradient rows with other processes.
#include <cstdint>
#include <vector>

#include "cc_ops/tf/base/shapes.h"
#include "cc_ops/tf/exchange/row_dtype.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

using tensorflow::shape_inference::InferenceContext;

#define SLIPSTREAM_SEND_BUFFER_DOC                                                      \
  "sizes: [ranks, tables]. Number of rows for each rank; with ranks = 1, all rows are " \
  "for all ranks.\n"                                                                    \
  "keys: [n]. Each once; by rank, then by table.\n"                                     \
  "values: The rows in the order of keys, each as wide as its table.\n"                 \
  "squares: [ranks, tables]. Sum of the squares of these values.\n"                     \
  "ranks: Number of ranks that own keys. A hash of the key selects the rank.\n"

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
        "Sums the gradients of each key, and returns the sums that the update policies do not"
        " defer.\n"
        "\n"
        "These are sums of this batch and deferred sums that are due. No row changes.\n"
        "\n"
        "plan: Scalar, from SlipstreamLookup.\n"
        "gradients: The gradients of the pooled outputs of the lookup, in their shapes. All "
        "values must be finite, unless passes_non_finite is set.\n"
        "learning_rate: Scalar for all tables, or [tables].\n" SLIPSTREAM_SEND_BUFFER_DOC
        "advance_step: Whether this op counts as an update of the tables. Otherwise "
        "SlipstreamApplyRows does.\n"
        "passes_non_finite: Whether gradients that are not finite are accepted. All values "
        "are NaN then.\n");

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
        "Returns and removes every deferred gradient of the tables.\n"
        "\n"
        "handles: Scalars. The tables.\n" SLIPSTREAM_SEND_BUFFER_DOC);

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
Sums the gradient rows of each key and applies the update rule of its table once per key.

Rows are added in the order of the input, so that the result does not depend on threads.

handles: Scalars. The tables.
sizes: [ranks, tables]. Number of rows from each rank for each table.
keys: [n]. By rank, then by table.
values: The rows in the order of `keys`, each as wide as its table. All values must be finite.
learning_rate: Scalar for all tables, or [tables].
scale: [tables]. Factors on the sums; empty: no scaling.
create_missing: Whether rows are created for keys without a row. Otherwise the gradients of these
  keys are dropped and counted.
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
        "Packs sizes, keys and values into one message per rank, whose length rarely changes.\n"
        "\n"
        "sizes: [ranks, tables]. Number of rows for each rank.\n"
        "keys: [n]. By rank, then by table.\n"
        "values: The rows in the order of keys, each as wide as its table.\n"
        "row_floats: [tables]. Values per row; 0 for keys without values.\n"
        "messages: All messages, rank 0 first.\n"
        "lengths: [ranks]. Bytes of each message.\n" SLIPSTREAM_WIRE_DTYPE_DOC
        "  Int8 values are rounded stochastically; the random numbers depend on key and "
        "values only.\n");

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
Unpacks the messages that the ranks packed with SlipstreamPackMessages for this rank.

messages: One message per rank, rank 0 first.
ranks: Number of ranks.
row_floats: [tables]. Values per row, as in SlipstreamPackMessages.
sizes: [ranks, tables]. Number of rows from each rank.
keys: [n]. By rank, then by table.
values: The rows in the order of `keys`.
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
Sums the rows of each key in the order of the input, and groups the sums by the rank that owns the
key.

sizes: [parts, tables]. Number of rows of each part.
keys: [n]. By part, then by table.
values: The rows in the order of `keys`, each as wide as its table.
ranks: Number of ranks that own keys. A hash of the key selects the rank.
row_floats: [tables]. Values per row.
merged_sizes: [ranks, tables].
merged_keys: [m]. Each once; by rank, then by table, then ascending.
merged_values: The sums in the order of `merged_keys`.
squares: [ranks, tables]. Sum of the squares of these values.
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
        "Reads the rows of keys that ranks request, and packs one message per rank.\n"
        "\n"
        "handles: Scalars. The tables.\n"
        "sizes: [ranks, tables]. Number of keys from each rank.\n"
        "keys: [n]. By rank, then by table.\n"
        "with_summary: Scalar. Whether a number that summarizes the slots accompanies each "
        "row of a table with slots.\n"
        "create_missing: Whether rows are created for missing keys and every key counts as "
        "accessed. Otherwise missing keys return their initial values.\n"
        "messages: The rows, rank 0 first. Rows with their initial values are not sent. The "
        "lengths rarely change.\n"
        "lengths: [ranks]. Bytes of each message.\n"
        "row_bytes: [ranks]. Bytes of the rows in each message.\n" SLIPSTREAM_WIRE_DTYPE_DOC);

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
Sorts lists of keys, each on its own.

keys: [n], where n may differ between the lists.
sorted: [n]. Ascending.
)doc");

}  // namespace slipstream
