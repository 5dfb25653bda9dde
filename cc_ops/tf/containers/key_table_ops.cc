// Registration of the key sets.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamKeySet")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Creates an empty set of keys; it lives until the last copy of its handle is gone.

On a GPU the set has a copy of its content in the GPU's memory.

handle: The new set.
)doc");

REGISTER_OP("SlipstreamKeySetAssign")
    .Input("handle: resource")
    .Input("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n]"))
    .Doc(R"doc(
Replaces the content of a set of keys. Steps that are running go on with the content they began with.

handle: Of the set.
keys: [n]. Any int64 is a legal key; one given twice counts once.
)doc");

}  // namespace slipstream
