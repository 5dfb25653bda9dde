// Registrations of the ops that defer the gradients of a variable's rows.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamDeferredGradients")
    .Output("handle: resource")
    .Attr("dim: int")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Creates buffers for the deferred gradients of a variable's rows.

The buffers have no capacity and defer nothing until SlipstreamDeferredGradientsConfigure runs. They
are deleted with the last copy of their handle.

handle: Scalar. The buffers.
dim: Number of values per row, 1 to 65536.
)doc");

REGISTER_OP("SlipstreamDeferredGradientsConfigure")
    .Input("handle: resource")
    .Input("capacity: int64")
    .Input("max_rows: int64")
    .Input("max_age: int64")
    .Attr("defers: bool")
    .Attr("by_movement: bool")
    .Attr("is_shadow: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], [], []"))
    .Doc(R"doc(
Sets how gradients are deferred from the next step on. Deferred sums stay.

Call it between steps. On a GPU it waits for copies to finish if the capacity changes.

handle: Scalar. The buffers.
capacity: Scalar, at least 0. Number of sums to allocate memory for. The capacity stays larger while
  more sums are deferred.
max_rows: Scalar, at least 0. Maximum number of deferred sums. Further gradients are due at once.
max_age: Scalar, at least 1. Number of steps after which a sum is due.
defers: Whether further gradients may be deferred.
by_movement: Whether `may_wait` of SlipstreamTakeDue decides which sums may wait. Otherwise the sums
  of saturated rows may wait.
is_shadow: Whether steps only count, and the caller applies the gradients of the step.
)doc");

REGISTER_OP("SlipstreamDeferredGradientsFlush")
    .Input("handle: resource")
    .Attr("drops: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Makes all sums due in the next step, which defers nothing.

handle: Scalar. The buffers.
drops: Whether the sums are dropped at once instead, unless an earlier call has made them due. They
  count as flushed. Use it for the sums of a dry run.
)doc");

REGISTER_OP("SlipstreamDeferredGradientsState")
    .Input("handle: resource")
    .Output("counts: int64")
    .Output("num_deferred: int64")
    .Output("capacity: int64")
    .Output("flushes: bool")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [6], [], [], []"))
    .Doc(R"doc(
Returns counts of the gradient rows of all steps. All outputs are in host memory.

handle: Scalar. The buffers.
counts: [6]. Rows added to a sum that stayed; rows due by movement; sums due by age; sums flushed;
  rows over the budget; sums that were due in a step without a gradient of their key.
num_deferred: Scalar. Number of deferred sums.
capacity: Scalar. Number of sums that fit into the buffers, at 16 + 4 * dim bytes each.
flushes: Scalar. Whether all sums are due in the next step.
)doc");

REGISTER_OP("SlipstreamDeferredGradientsExport")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("ages: int64")
    .Output("sums: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n], [n], [n, d]"))
    .Doc(R"doc(
Returns the deferred sums. All outputs are in host memory. Call it between steps.

handle: Scalar. The buffers.
keys: [n]. The oldest sums first; sums of equal age by ascending key.
ages: [n]. Number of steps since each sum began.
sums: [n, dim].
)doc");

REGISTER_OP("SlipstreamDeferredGradientsImport")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("ages: int64")
    .Input("sums: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n], [n, d]"))
    .Doc(R"doc(
Replaces the deferred sums. All inputs are in host memory. Call it between steps.

handle: Scalar. The buffers.
keys: [n]. Each at most once, in any order.
ages: [n]. At least 0. Number of steps since each sum began.
sums: [n, dim]. The capacity grows if necessary.
)doc");

REGISTER_OP("SlipstreamAddDeferred")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("gradients: float")
    .Output("indices: int64")
    .Output("sums: float")
    .Output("by_movement: bool")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n, d] -> [n], [n, d], []"))
    .Doc(R"doc(
Computes the sums of a step, without changing the buffers: the first half of a step.

handle: Scalar. The buffers.
keys: [n]. Each at most once. Only the CPU checks this; on a GPU, gradients of equal keys may be
  lost.
gradients: [n, dim]. One gradient per key.
indices: [n]. Input of SlipstreamTakeDue.
sums: [n, dim]. Each gradient plus the deferred sum of its key.
by_movement: Scalar, in host memory. Whether SlipstreamTakeDue reads `may_wait`.
)doc");

REGISTER_OP("SlipstreamTakeDue")
    .Input("handle: resource")
    .Input("saturated: resource")
    .Input("keys: int64")
    .Input("indices: int64")
    .Input("sums: float")
    .Input("may_wait: bool")
    .Output("due_keys: int64")
    .Output("due_sums: float")
    .Output("is_shadow: bool")
    .Output("defers: bool")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], [n], [n], [n, d], [n] -> [due], [due, d], [], []"))
    .Doc(R"doc(
Defers the sums that may wait, and returns the sums that are due: the second half of a step.

A sum is due if it may not wait, has a value that is not finite, reaches the maximum age, or finds
no room, and in a flush. On a GPU a step allocates temporary memory for n + capacity rows.

handle: Scalar. The buffers.
saturated: Scalar. A SlipstreamKeySet on the same device with the rows that may wait. It is read
  unless the buffers are configured with `by_movement`.
keys: [n]. The keys that SlipstreamAddDeferred received in the same step.
indices: [n]. Output of SlipstreamAddDeferred.
sums: [n, dim]. Output of SlipstreamAddDeferred.
may_wait: [n]. Whether each sum may wait. It is read only with `by_movement`.
due_keys: [due]. Ascending, each once.
due_sums: [due, dim].
is_shadow: Scalar, in host memory. Whether the caller must apply the gradients of the step instead
  of the due sums.
defers: Scalar, in host memory. Whether further gradients may be deferred.
)doc");

}  // namespace slipstream
