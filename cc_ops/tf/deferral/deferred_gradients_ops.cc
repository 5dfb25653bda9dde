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

A step is one run of SlipstreamAddDeferred and SlipstreamTakeDue. Run this op between steps. On a
GPU it waits for copies to finish if the capacity changes.

handle: Scalar. The buffers.
capacity: Scalar, at least 0. Number of sums to allocate memory for. If more sums are deferred when
  the op runs, it allocates memory for these.
max_rows: Scalar, at least 0. Maximum number of deferred sums. Further gradients are due at once.
max_age: Scalar, at least 1. Number of steps after which a sum is due.
defers: Whether further gradients may be deferred. Otherwise a sum is due at the next gradient of
  its key, or by age.
by_movement: Whether `may_wait` of SlipstreamTakeDue decides which sums may wait. Otherwise the sums
  of saturated rows may wait.
is_shadow: Whether the sums of steps are only counted. The caller then applies every gradient at
  once, as in a dry run.
)doc");

REGISTER_OP("SlipstreamDeferredGradientsFlush")
    .Input("handle: resource")
    .Attr("drops: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Makes all sums due in the next step.

That step defers no further gradient, unless the buffers are empty now.

handle: Scalar. The buffers.
drops: Whether the sums are dropped now instead. They count as flushed. Use it for the sums of a dry
  run. Note: sums that an earlier run of this op has made due are not dropped.
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
counts: [6]. Rows that were deferred; rows due by movement; sums due by age; sums flushed; rows that
  were not deferred because the budget of `max_rows` or the capacity was used up; sums that were due
  in a step without a gradient of their key.
num_deferred: Scalar. Present number of deferred sums.
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
Returns the deferred sums. All outputs are in host memory. Run it between steps.

handle: Scalar. The buffers.
keys: [n]. The oldest sums first; sums of equal age by ascending key.
ages: [n]. Number of steps since each sum began.
sums: [n, dim]. The deferred gradients.
)doc");

REGISTER_OP("SlipstreamDeferredGradientsImport")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("ages: int64")
    .Input("sums: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n], [n, d]"))
    .Doc(R"doc(
Replaces the deferred sums. All inputs are in host memory. Run it between steps.

The capacity grows if necessary. Sums that a flush had made due are replaced, too.

handle: Scalar. The buffers.
keys: [n]. Each at most once, in any order. Not the lowest int64.
ages: [n]. At least 0. Number of steps since each sum began.
sums: [n, dim]. The deferred gradients; finite.
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
Computes the sums of a step. This is the first half of a step.

The buffers do not change.

handle: Scalar. The buffers.
keys: [n]. Each at most once. On a GPU, SlipstreamTakeDue reports a repeated key.
gradients: [n, dim]. One gradient per key.
indices: [n]. Position of each key's deferred sum in the buffers, or -1. Input of
  SlipstreamTakeDue.
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
Defers or returns the sums of a step. This is the second half of a step.

Sums that may wait are stored in the buffers. Sums that are due are returned. A sum is due if it may
not wait, has a value that is not finite, reaches the maximum age or finds no room. All sums are due
in a flush. While the buffers defer no further gradients, a sum is also due at the next gradient of
its key. After an error of an argument or of an allocation the sums are unchanged.

On a GPU a step allocates temporary memory for the rows that may leave. In a flush, in the first
step after SlipstreamDeferredGradientsImport, and after a change of `max_age`, these are all
deferred gradients.

handle: Scalar. The buffers.
saturated: Scalar. A SlipstreamKeySet on the same device with the keys of the saturated rows, which
  may wait. It is not read if the buffers are configured with `by_movement`.
keys: [n]. The keys that SlipstreamAddDeferred received in the same step.
indices: [n]. Output of SlipstreamAddDeferred.
sums: [n, dim]. Output of SlipstreamAddDeferred.
may_wait: [n]. Whether each sum may wait. It is read only with `by_movement`.
due_keys: [due]. Ascending, each once. A due sum whose key has no gradient in this step is included.
due_sums: [due, dim]. The sums to apply now.
is_shadow: Scalar, in host memory. Whether the caller must apply the gradients of the step instead
  of the due sums.
defers: Scalar, in host memory. `defers` of SlipstreamDeferredGradientsConfigure.
)doc");

}  // namespace slipstream
