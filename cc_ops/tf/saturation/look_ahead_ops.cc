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
Starts or continues a window of batches.

After the last batch of the window was returned, the dataset prepares no batch in advance. Run this
op at the start of each window.

handle: Scalar, from SlipstreamLookAhead.
batches: Scalar, at least 0. Number of batches of the window; 0 means no limit.
pulled: Scalar, at least 0. Number of these batches that the dataset has already returned.
)doc");

REGISTER_OP("SlipstreamLookAheadWaitUntilIdle")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Waits until no batch is being prepared.

Afterwards, the state that the preparation of a batch changes is constant until the next batch is
requested, so that it can be read or saved. Returns Cancelled if the step is cancelled. The op does
not wait for batches of a deleted iterator.

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
Prepares the next element of a dataset while the current element is used.

The elements and their order are the same as in the input.

Another thread starts to prepare an element when the previous element is returned. If a window ends
between the two, the element is prepared when it is requested. A checkpoint of an iterator waits for
an element that is being prepared, and contains it.

input_dataset: Scalar. The dataset that provides the elements.
handle: Scalar, from SlipstreamLookAhead.
dataset: Scalar. The dataset with the same elements.
output_types: Data types of the components of an element.
output_shapes: Shapes of the components of an element.
)doc");

}  // namespace slipstream
