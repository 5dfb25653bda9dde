// Registrations of the ops on rows of which other ranks keep copies.
#include "cc_ops/tf/base/shape_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SlipstreamTablePublish")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("movement: float")
    .Attr("ranks: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status { return CheckRanks(c, {0, 1, 0}); })
    .Doc(R"doc(
Says of which rows of a table, which this rank owns, other ranks keep copies.

What was sent of rows that stay among them remains known.

handle: scalar.
keys: [n], each once.
movement: scalar, at least 0; a copy is sent anew when a value of the row is further away from it.
ranks: how many there are.
)doc");

REGISTER_OP("SlipstreamTableExportPublished")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("rows: float")
    .Output("holders: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      constexpr auto kUnknown = InferenceContext::kUnknownDim;
      c->set_output(0, c->Vector(kUnknown));
      c->set_output(1, c->Matrix(kUnknown, kUnknown));
      c->set_output(2, c->Matrix(kUnknown, kUnknown));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads what was sent last of the rows of which other ranks keep copies.

handle: scalar.
keys: [n].
rows: [n, dim + slots], as they were sent.
holders: [n, (ranks + 7) / 8]; bit r of a row is set if rank r has a copy.
)doc");

REGISTER_OP("SlipstreamTableImportPublished")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("rows: float")
    .Input("holders: uint8")
    .Attr("ranks: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status { return CheckRanks(c, {0, 1, 2, 2}); })
    .Doc(R"doc(
Replaces what was sent last of the rows of which other ranks keep copies; the movement stays.

handle: scalar.
keys: [n], each once.
rows: [n, dim + slots], finite.
holders: [n, (ranks + 7) / 8], see SlipstreamTableExportPublished.
ranks: how many there are.
)doc");

}  // namespace slipstream
