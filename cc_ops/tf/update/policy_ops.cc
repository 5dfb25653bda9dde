// Registrations of the ops that set and watch a table's update policy.
#include "cc_ops/tf/base/shape_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

}  // namespace

REGISTER_OP("SlipstreamTableSetPolicy")
    .Input("handle: resource")
    .Input("movement: float")
    .Input("max_age: int64")
    .Input("max_rows: int64")
    .Attr("mode: {'apply', 'mask', 'defer'}")
    .Attr("trigger: {'movement', 'interval'} = 'movement'")
    .Attr("decay_skipped: bool = false")
    .Attr("ranks: int >= 1 = 1")
    .Attr("is_shadow: bool = false")
    .Attr("is_exchanged: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status { return CheckRanks(c, {0, 0, 0, 0}); })
    .Doc(R"doc(
Says what becomes of the gradients of a table's rows from the next update on.

handle: scalar.
movement: scalar, in the unit of the rows: a held sum is applied when that would move a
  value of its row so far (trigger "movement").
max_age: scalar, in updates: no sum is held longer.
max_rows: scalar: sums held at most; gradients of other rows are applied at once.
mode: "apply" as they come; "mask": those of rows marked saturated are thrown away; "defer":
  they are summed per row, and a sum is applied as one gradient when it is due.
trigger: which rows' gradients are held: "movement": any row's; "interval": those of rows
  marked saturated.
decay_skipped: whether the moments of masked rows decay (Adam).
ranks: simulated ranks that share each batch evenly and hold sums of their own.
is_shadow: nothing is masked or held, but what would have been is counted, for a sample of
  one in 16 keys. Sums held before are applied when the mode, the trigger, the ranks
  or this changes.
is_exchanged: sums leave by SlipstreamCollectGradients and SlipstreamCollectHeld only; an
  evaluation, a flush or an eviction leaves them where they are.
)doc");

REGISTER_OP("SlipstreamTableMarkRows")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("marks: uint8")
    .Attr("makes_rows: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status { return CheckRanks(c, {0, 1, 1}); })
    .Doc(R"doc(
Replaces the marks of a table's rows and starts their travelled lengths anew.

handle: scalar.
keys: [n]; rows that are not named have no mark.
marks: [n]; bit 0: saturated, bit 1: watched.
makes_rows: whether keys without a row that get a mark get a row; else they are passed over.
)doc");

REGISTER_OP("SlipstreamTableTravelled")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("travelled: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0, 1}));
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums of the squared lengths of the updates of watched rows.

handle: scalar.
keys: [n].
travelled: [n], since SlipstreamTableMarkRows; 0 for a row that is not watched.
)doc");

REGISTER_OP("SlipstreamTableUpdateCounts")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
      c->set_output(0, c->Vector(11));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What became of a table's gradient rows (one per key, update and rank) so far.

handle: scalar.
counts: [11]: offered; sent (applied, held ones included); masked; held (added to a sum that
  stayed); of those sent: due by movement, due by age, flushed, without room to be held;
  sums whose row was evicted; sums held now; their bytes.
)doc");

REGISTER_OP("SlipstreamTableFlush")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status { return CheckRanks(c, {0}); })
    .Doc(R"doc(
Applies every gradient sum that is held, each as one gradient.

handle: scalar.
)doc");

}  // namespace slipstream
