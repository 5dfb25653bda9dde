// Registration of the key maps and their probes.
#include "absl/status/status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Of inputs "handle" and "keys".
absl::Status CheckInputs(InferenceContext* c, ShapeHandle* keys) {
  ShapeHandle handle;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &handle));
  return c->WithRank(c->input(1), 1, keys);
}

}  // namespace

REGISTER_OP("SlipstreamKeyMap")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Creates an empty map of keys; it lives until the last copy of its handle is gone.

On a GPU the map keeps a copy of its content in the GPU's memory.

handle: The new map.
)doc");

REGISTER_OP("SlipstreamKeyMapAssign")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("states: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle keys, states;
      TF_RETURN_IF_ERROR(CheckInputs(c, &keys));
      return c->WithRank(c->input(2), 1, &states);
    })
    .Doc(R"doc(
Replaces the content of a map of keys. Steps that are running go on with the content they began with.

handle: Of the map.
keys: [n]. Any int64 is a legal key; of one given twice the first counts. Key i gets place i.
states: [n], or [0]: all are 0.
)doc");

REGISTER_OP("SlipstreamProbeFrozen")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("places: int64")
    .Output("hits: int64")
    .Output("misses: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(CheckInputs(c, &keys));
      c->set_output(0, keys);
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Looks keys up in a map, and parts those that are in it from the others.

handle: Of the map.
keys: [n].
places: [n]. The key's place in the map, or -1.
hits: [h]. Positions of the keys that are in the map, ascending.
misses: [n - h]. Positions of the others, ascending.
)doc");

REGISTER_OP("SlipstreamLookUpStates")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("states: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(CheckInputs(c, &keys));
      c->set_output(0, keys);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Looks up the states of keys.

handle: Of the map.
keys: [n].
states: [n]. 0 for a key that is not in the map.
)doc");

}  // namespace slipstream
