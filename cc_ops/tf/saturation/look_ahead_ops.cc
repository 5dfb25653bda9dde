// Registrations of the ops that make a batch while another batch is trained.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamLookAhead")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Creates an object that limits how far datasets prepare batches in advance.

At first there is no limit. It is deleted with the last copy of its handle.

handle: Scalar. The new object.
)doc");

REGISTER_OP("SlipstreamLookAheadBeginWindow")
    .Input("handle: resource")
    .Input("batches: int64")
    .Input("pulled: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], []"))
    .Doc(R"doc(
Starts or continues a window. No batch of the next window is made before the next call.

handle: Scalar, from SlipstreamLookAhead.
batches: Scalar, at least 0. Number of batches of the window; 0 means no limit.
pulled: Scalar, at least 0. Number of these batches that were returned before.
)doc");

REGISTER_OP("SlipstreamLookAheadSettle")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Waits until no batch is being made, so that the state that making a batch changes stays constant
until a batch is requested.

Returns Cancelled if the step is cancelled. Batches for a deleted iterator are not waited for.

handle: Scalar, from SlipstreamLookAhead.
)doc");

REGISTER_OP("SlipstreamAheadDataset")
    .Input("input_dataset: variant")
    .Input("handle: resource")
    .Output("dataset: variant")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [] -> []"))
    .Doc(R"doc(
Returns the same elements, and makes the next element on another thread while the current one is
used.

Making an element starts when the previous one is returned. If a window ends in between, it starts
when the element is requested. A checkpoint of an iterator waits for the element and contains it.

input_dataset: Scalar.
handle: Scalar, from SlipstreamLookAhead.
dataset: Scalar.
)doc");

}  // namespace slipstream
