// Registration of the ops that defer the gradients of a variable's rows until they are due.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamDeferredGradients")
    .Output("handle: resource")
    .Attr("dim: int")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Makes buffers for deferred gradients of a variable's rows; they live until the last copy of the
handle is gone. Without room, and by a rule that defers nothing, until
SlipstreamDeferredGradientsConfigure.

handle: Of the deferred gradients.
dim: Values per row, 1 to 65536.
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
Says how gradients are deferred from the next step on. What is deferred stays.

Call it between steps. On a GPU it waits for copies if the room changes.

handle: Of the deferred gradients.
capacity: Scalar, from 0. Rows to make room for; there is more if more are deferred.
max_rows: Scalar, from 0. Rows deferred at most; further gradients leave at once.
max_age: Scalar, from 1. Steps after which a sum leaves.
defers: Whether anything more is deferred.
by_movement: Whether the caller decides which sums may wait; else those of saturated rows may.
is_shadow: Whether steps are counted only: their own gradients are to be applied.
)doc");

REGISTER_OP("SlipstreamDeferredGradientsFlush")
    .Input("handle: resource")
    .Attr("drops: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Makes all sums leave with the next step, in which nothing is deferred.

handle: Of the deferred gradients.
drops: Whether they are dropped at once instead, as those of shadow mode are, unless they are on
  their way out. They are counted as flushed.
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
Says what became of the gradient rows of all steps so far. All outputs are in host memory.

handle: Of the deferred gradients.
counts: [6]. Rows that were added to a sum that stayed; that left because of their movement; sums
  that left because of their age; because of a flush; rows over budget; sums that left in a step
  without a gradient for their key.
num_deferred: Scalar. Sums that are deferred.
capacity: Scalar. Sums that there is room for: 16 + 4 * dim bytes each.
flushes: Scalar. Whether all leave with the next step.
)doc");

REGISTER_OP("SlipstreamDeferredGradientsExport")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("ages: int64")
    .Output("sums: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n], [n], [n, d]"))
    .Doc(R"doc(
Gives the sums that are deferred. All outputs are in host memory; call it between steps.

handle: Of the deferred gradients.
keys: [n]. The oldest first; of one age, ascending.
ages: [n]. Steps since each sum began.
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
Defers these sums instead of those that are deferred. All inputs are in host memory; call it between
steps.

handle: Of the deferred gradients.
keys: [n]. Each once, in any order.
ages: [n], from 0. Steps since each sum began.
sums: [n, dim]. There is room for all of them afterwards.
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
First half of a step: what the sums would be. It changes nothing.

handle: Of the deferred gradients.
keys: [n]. Each once, which the CPU checks; on a GPU a gradient may be lost otherwise.
gradients: [n, dim]. Of each key.
indices: [n]. For the second half.
sums: [n, dim]. Each gradient and what is deferred of its key, added.
by_movement: Scalar, in host memory. Whether the second half will read `may_wait`.
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
Second half of a step: defers the sums that may wait, and takes out those that are due.

A sum leaves if it may not wait, has a value that is not finite, has come of age, is over budget,
or in a flush. On a GPU a step takes memory for n + capacity rows besides.

handle: Of the deferred gradients.
saturated: Handle of a SlipstreamKeySet on the same device: the rows that may wait, unless the
  caller decides.
keys: [n]. As the first half got them.
indices: [n]. As the first half gave them, in the same step.
sums: [n, dim]. As the first half gave them.
may_wait: [n]. The caller's decision; read only if the first half said so.
due_keys: [due]. Ascending, each once.
due_sums: [due, dim].
is_shadow: Scalar, in host memory. Whether to apply the step's own gradients instead of the sums.
defers: Scalar, in host memory. Whether anything will be deferred from now on.
)doc");

}  // namespace slipstream
