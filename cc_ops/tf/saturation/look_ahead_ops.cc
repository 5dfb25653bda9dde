// Registrations of the ops that make a batch while another one trains.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamLookAhead")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Creates what says how far data sets work ahead; it lives until the last copy of its handle is gone.

At first no window ever ends.

handle: scalar.
)doc");

REGISTER_OP("SlipstreamLookAheadBeginWindow")
    .Input("handle: resource")
    .Input("batches: int64")
    .Input("pulled: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], []"))
    .Doc(R"doc(
Says that a window begins, or goes on: no batch of the next one is made before that begins.

handle: scalar.
batches: scalar, at least 0. Batches of the window; 0: it never ends.
pulled: scalar, at least 0. Those of them that were handed out before.
)doc");

REGISTER_OP("SlipstreamLookAheadSettle")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Waits until no batch is being made: what its making changes stays as it is until one is pulled.

It ends with Cancelled if the step is cancelled. What is made for a reader that is gone is not
waited for.

handle: scalar.
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
The same elements; one is made on another thread while the one before is used.

It begins when that one is handed out, unless a window ends in between: then when it is pulled. An
iterator's checkpoint waits for it and has it.

input_dataset: scalar.
handle: scalar, of SlipstreamLookAhead.
dataset: scalar.
)doc");

}  // namespace slipstream
