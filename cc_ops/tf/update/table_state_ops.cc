// Registrations of the ops that read and replace what a table has beside its rows.
#include "cc_ops/tf/base/shape_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;
using tf::shape_inference::DimensionHandle;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

}  // namespace

REGISTER_OP("SlipstreamTableExportDeferred")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("ages: int64")
    .Output("ranks: int32")
    .Output("sums: float")
    .Output("learning_rate: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      const DimensionHandle n = c->UnknownDim();
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(n));
      c->set_output(3, c->Matrix(n, c->UnknownDim()));
      c->set_output(4, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The deferred gradients of a table; they stay.

handle: scalar.
keys: [n], in an order that SlipstreamTableImportDeferred takes.
ages: [n], updates of the table since the sum began.
ranks: [n], simulated ranks.
sums: [n, dim].
learning_rate: scalar, of the last update; a flush goes by it.
)doc");

REGISTER_OP("SlipstreamTableImportDeferred")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("ages: int64")
    .Input("ranks: int32")
    .Input("sums: float")
    .Input("learning_rate: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      return CheckRanks(c, {0, 1, 1, 1, 2, 0});
    })
    .Doc(R"doc(
Replaces the deferred gradients of a table; all or nothing.

handle: scalar. The table's policy must defer gradients, unless there are none.
keys: [n], each once per rank; with a row, unless they are exchanged.
ages: [n], the oldest first.
ranks: [n], simulated ranks.
sums: [n, dim].
learning_rate: scalar.
)doc");

REGISTER_OP("SlipstreamTableRowFlags")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("flags: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 1}));
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The flags of rows; a row that left the table and came back has none.

handle: scalar.
keys: [n].
flags: [n], as SlipstreamTableSetRowFlags takes them; 0 for a key without a row.
)doc");

REGISTER_OP("SlipstreamTableSetSquaredUpdateLengths")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("lengths: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 1, 1}));
      return c->Merge(c->input(1), c->input(2), &keys);
    })
    .Doc(R"doc(
Replaces the squared update lengths of watched rows.

handle: scalar.
keys: [n]; those that are not watched are skipped.
lengths: [n].
)doc");

}  // namespace slipstream
