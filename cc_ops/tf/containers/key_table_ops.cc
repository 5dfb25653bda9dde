// Registration of the key maps, their probes, and the key sets.
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

REGISTER_OP("SlipstreamKeyMap")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Creates an empty map of keys; it lives until the last copy of its handle is gone.

On a GPU the map has a copy of its content in the GPU's memory.

handle: The new map.
)doc");

REGISTER_OP("SlipstreamKeyMapAssign")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("states: uint8")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [?]"))
    .Doc(R"doc(
Replaces the content of a map of keys. Steps that are running go on with the content they began with.

handle: Of the map.
keys: [n]. Any int64 is a legal key; of one given twice the first counts. Key i gets index i.
states: [n], or [0]: all are 0.
)doc");

REGISTER_OP("SlipstreamProbeKeys")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("indices: int64")
    .Output("hits: int64")
    .Output("misses: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> [n], [?], [?]"))
    .Doc(R"doc(
Looks keys up in a map, and parts those that are in it from the others.

handle: Of the map.
keys: [n].
indices: [n]. The key's index in the map, or -1.
hits: [h]. Positions of the keys that are in the map, ascending.
misses: [n - h]. Positions of the others, ascending.
)doc");

REGISTER_OP("SlipstreamLookUpStates")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("states: uint8")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> [n]"))
    .Doc(R"doc(
Looks up the states of keys.

handle: Of the map.
keys: [n].
states: [n]. 0 for a key that is not in the map.
)doc");

}  // namespace slipstream
