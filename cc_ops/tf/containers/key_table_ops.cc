// Registrations of the ops of key sets.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamKeySet")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Creates an empty set of keys. It is deleted with the last copy of its handle.

On a GPU the set also keeps a copy of its content in GPU memory.

handle: Scalar. The new set.
)doc");

REGISTER_OP("SlipstreamKeySetAssign")
    .Input("handle: resource")
    .Input("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n]"))
    .Doc(R"doc(
Replaces the content of a set of keys.

An op that is running continues with the old content.

handle: Scalar. The set.
keys: [n]. Any int64. A repeated key counts once.
)doc");

}  // namespace slipstream
