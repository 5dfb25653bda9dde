// Registration of the ops that count accesses, and find the most accessed keys, in bounded memory.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamHotKeys")
    .Output("handle: resource")
    .Attr("log2_width: int >= 1")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Makes a sketch of accesses, all 0, whose counters remember a key each; it lives until the last copy
of its handle is gone.

handle: Of the sketch.
log2_width: Up to 30. There are 4 rows of 2^log2_width counters, of 24 bytes each.
)doc");

REGISTER_OP("SlipstreamCountAccesses")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("counts: bool")
    .Attr("unit: int >= 1 = 1")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n]"))
    .Doc(R"doc(
Counts a batch's accesses. The result depends on the batches only, on no order of threads.

handle: Of the sketch.
keys: [n]. One that is given twice counts twice.
counts: [n]. Whether a key counts; padding does not.
unit: What an access adds to the counts: what decays must leave of it.
)doc");

REGISTER_OP("SlipstreamDecayAccesses")
    .Input("handle: resource")
    .Input("factor: double")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], []"))
    .Doc(R"doc(
Multiplies all counts; each is rounded down.

handle: Of the sketch.
factor: Scalar, 0 to 1; in steps of 2^-32.
)doc");

REGISTER_OP("SlipstreamHotKeyCandidates")
    .Input("handle: resource")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n]"))
    .Doc(R"doc(
Returns the keys that are remembered: the hottest are almost surely among them.

handle: Of the sketch.
keys: [4 * 2^log2_width]. A key stands for each counter that remembers it; int64's lowest number for
  those that remember none.
)doc");

REGISTER_OP("SlipstreamEstimateAccesses")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("accesses: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> [n]"))
    .Doc(R"doc(
Estimates the accesses of keys: what was counted of each, and of those that share all its counters.

handle: Of the sketch.
keys: [n].
accesses: [n]. In units; never lower than what was counted, but for rounding by decays.
)doc");

}  // namespace slipstream
