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

The sketch has 4 lines of counters. A key has one counter in each line, which it shares with other
keys. Each counter also stores a candidate for the most accessed keys. All counts start at 0. The
sketch is deleted with the last copy of its handle.

handle: Scalar. The new sketch.
log2_width: 1 to 30. Each line has 2^log2_width counters of 24 bytes.
)doc");

REGISTER_OP("SlipstreamCountAccesses")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("counts: bool")
    .Attr("unit: int >= 1 = 1")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n]"))
    .Doc(R"doc(
Counts the accesses of a batch. The result does not depend on the number of threads.

handle: Scalar. The sketch.
keys: [n]. A repeated key counts every time.
counts: [n]. Whether each key counts. Use false for padding.
unit: Value that one access adds to a count. With a larger unit, less is lost when
  SlipstreamDecayAccesses rounds counts down.
)doc");

REGISTER_OP("SlipstreamDecayAccesses")
    .Input("handle: resource")
    .Input("factor: double")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], []"))
    .Doc(R"doc(
Multiplies all counts by a factor. Each result is rounded down.

handle: Scalar. The sketch.
factor: Scalar, 0 to 1. It is rounded to a multiple of 2^-32.
)doc");

REGISTER_OP("SlipstreamHotKeyCandidates")
    .Input("handle: resource")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n]"))
    .Doc(R"doc(
Returns the candidate keys of all counters. They include the most accessed keys with high
probability.

handle: Scalar. The sketch.
keys: [4 * 2^log2_width]. The candidate of each counter; the lowest int64 if it has none. A key can
  be the candidate of up to 4 counters.
)doc");

REGISTER_OP("SlipstreamEstimateAccesses")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("accesses: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> [n]"))
    .Doc(R"doc(
Estimates the access counts of keys.

The estimate is the smallest of the key's 4 counters. It is too high if other keys share each of
these counters.

handle: Scalar. The sketch.
keys: [n].
accesses: [n]. Estimates as multiples of accesses and `unit` of SlipstreamCountAccesses. Never below
  the true count, except for rounding when counts decay.
)doc");

}  // namespace slipstream
