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
  "keys: [n]. By rank, then by table; each once per table.\n"                           \
  "values: [m]. The rows in the order of keys, each with the dim of its table.\n"       \
  "squares: [ranks, tables]. Sum of the squares of these values.\n"                     \
  "ranks: Number of ranks that own keys. A hash of the key selects the rank.\n"

REGISTER_OP("SlipstreamCollectGradients")
    .Input("plan: variant")
    .Input("gradients: num_gradients * float")
    .Input("handles: num_tables * resource")
    .Input("learning_rate: float")
    .Attr("num_gradients: int >= 0")
    .Attr("num_tables: int >= 0")
    .Attr("advice: string = ''")
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
        "Sums the gradients of each key, and returns the sums to exchange.\n"
        "\n"
        "These are the sums of this batch that the update policies of the tables do not defer, and"
        " deferred sums that are due. No row changes. Exchange the"
        " outputs with the other ranks, then run SlipstreamApplyRows.\n"
        "\n"
        "plan: Scalar, from SlipstreamLookup or SlipstreamLookUpPulled. Or a sum from "
        "SlipstreamRowGradients; then gradients is empty.\n"
        "gradients: The gradients of the pooled outputs of the lookup, in their shapes. All "
        "values must be finite, unless passes_non_finite is set.\n"
        "handles: The tables, or none. They order the op between the lookups of a graph.\n"
        "learning_rate: Scalar for all tables, or [tables].\n" SLIPSTREAM_SEND_BUFFER_DOC
        "advice: As in SlipstreamApplyGradients.\n"
        "advance_step: Whether this op counts as an update of the tables. Set it for tables of "
        "replicas, whose rows SlipstreamApplyRows does not update.\n"
        "passes_non_finite: Whether gradients that are not finite are accepted. If there is one, "
        "all values are NaN, so that the other ranks detect it.\n");

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
Sums the gradient rows of each key and updates its row once.

Rows are added in the order of the input, so that the result does not depend on the number of
threads. This is one update of every table, also of a table without rows in the input.

handles: Scalars. The tables, each once.
sizes: [ranks, tables]. Number of rows from each rank for each table.
keys: [n]. By rank, then by table.
values: [m]. The rows in the order of `keys`, each with the dim of its table. All values must be
  finite, otherwise no row changes.
learning_rate: Scalar for all tables, or [tables].
scale: [tables]. Factor of the sums of each table, or [0] for no scaling.
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
        "Packs sizes, keys and values into one message per rank.\n"
        "\n"
        "The length of a message rarely changes, so that Horovod reuses its negotiated response.\n"
        "\n"
        "sizes: [ranks, tables]. Number of rows for each rank.\n"
        "keys: [n]. By rank, then by table.\n"
        "values: [m]. The rows in the order of keys.\n"
        "row_floats: [tables]. Values per row; 0 for keys without values.\n"
        "messages: [bytes]. All messages, rank 0 first.\n"
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

messages: [bytes]. One message from each rank, rank 0 first.
ranks: Number of ranks.
row_floats: [tables]. Values per row, as in SlipstreamPackMessages.
sizes: [ranks, tables]. Number of rows from each rank.
keys: [n]. By rank, then by table.
values: [m]. The rows in the order of `keys`.
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
Sums the rows of each key, and groups the sums by owner.

Rows are added in the order of the input. The owner is the rank that stores the row of the key.

sizes: [parts, tables]. Number of rows of each part and table. A part is, for example, the rows that
  one rank sent.
keys: [n]. By part, then by table.
values: [m]. The rows in the order of `keys`.
ranks: Number of ranks that own keys. A hash of the key selects the rank.
row_floats: [tables]. Values per row.
merged_sizes: [ranks, tables]. Number of sums for each rank and table.
merged_keys: [k]. By rank, then by table, then ascending; each once per table.
merged_values: [v]. The sums in the order of `merged_keys`.
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
    .Attr("joins_step: bool = false")
    .Output("messages: uint8")
    .Output("lengths: int32")
    .Output("row_bytes: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [] -> [bytes], [ranks], [ranks]"))
    .Doc(
        "Reads the rows of keys that ranks request, and packs one message per rank.\n"
        "\n"
        "handles: Scalars. The tables, each once.\n"
        "sizes: [ranks, tables]. Number of keys that each rank requests.\n"
        "keys: [n]. By rank, then by table.\n"
        "with_summary: Scalar. Whether each row of a table with slots has an additional number, "
        "a summary of its slots from which the other rank bounds the movement of the row.\n"
        "create_missing: Whether rows are created for missing keys and every key counts as "
        "accessed. Otherwise missing keys return their initial values.\n"
        "joins_step: As in SlipstreamLookup.\n"
        "messages: [bytes]. The messages, rank 0 first. Rows with their initial values are not "
        "contained, because SlipstreamLookUpPulled computes them. The lengths rarely change.\n"
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
Sorts each list of keys separately.

keys: [n] each, where n may differ between the lists.
sorted: [n] each. The keys of each list, ascending; repeated keys stay.
)doc");

}  // namespace slipstream
