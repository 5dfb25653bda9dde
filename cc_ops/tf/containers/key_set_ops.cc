// Registration of the key sets.
#include "absl/status/status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("SlipstreamKeySet")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Creates an empty set of keys; it lives until the last copy of its handle is gone.

On a GPU the set keeps a copy of its content in the GPU's memory.

handle: The new set.
)doc");

REGISTER_OP("SlipstreamKeySetAssign")
    .Input("handle: resource")
    .Input("keys: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle handle, keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &handle));
      return c->WithRank(c->input(1), 1, &keys);
    })
    .Doc(R"doc(
Replaces the content of a set of keys. Steps that are running go on with the content they began with.

handle: Of the set.
keys: [n]. Any int64 is a legal key; one given twice counts once.
)doc");

}  // namespace slipstream
