// Registrations of the ops that count accesses and find the most accessed keys in bounded memory.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamHotKeys")
    .Output("handle: resource")
    .Attr("log2_width: int >= 1")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Creates a sketch that estimates the access counts of keys in bounded memory.

Each counter also stores a candidate key. All counts start at 0. The sketch is deleted with the last
copy of its handle.

handle: Scalar. The sketch.
log2_width: At most 30. The sketch has 4 rows of 2^log2_width counters of 24 bytes.
)doc");

REGISTER_OP("SlipstreamCountAccesses")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("counts: bool")
    .Attr("unit: int >= 1 = 1")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n]"))
    .Doc(R"doc(
Counts the accesses of a batch. The result depends on the batches only, on any number of threads.

handle: Scalar. The sketch.
keys: [n]. A repeated key counts every time.
counts: [n]. Whether each key counts. Use false for padding.
unit: Value that one access adds to a count. A larger unit keeps more precision when counts decay.
)doc");

REGISTER_OP("SlipstreamDecayAccesses")
    .Input("handle: resource")
    .Input("factor: double")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], []"))
    .Doc(R"doc(
Multiplies all counts by a factor. Each result is rounded down.

handle: Scalar. The sketch.
factor: Scalar, 0 to 1, in steps of 2^-32.
)doc");

REGISTER_OP("SlipstreamHotKeyCandidates")
    .Input("handle: resource")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n]"))
    .Doc(R"doc(
Returns the candidate keys of all counters. They contain the most accessed keys with high
probability.

handle: Scalar. The sketch.
keys: [4 * 2^log2_width]. The key of each counter; the lowest int64 for a counter without one.
)doc");

REGISTER_OP("SlipstreamEstimateAccesses")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("accesses: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> [n]"))
    .Doc(R"doc(
Estimates the access counts of keys.

The estimate of a key is too high by the counts of other keys that share all of its counters.

handle: Scalar. The sketch.
keys: [n].
accesses: [n]. In units. Never below the true count, except for rounding when counts decay.
)doc");

}  // namespace slipstream
