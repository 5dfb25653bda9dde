// Registrations of the ops on what a table has beside its rows.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamTableSetPolicy")
    .Input("handle: resource")
    .Input("movement: float")
    .Input("max_age: int64")
    .Input("max_rows: int64")
    .Attr("mode: {'apply', 'mask', 'defer'}")
    .Attr("trigger: {'movement', 'interval'} = 'movement'")
    .Attr("decay_skipped: bool = false")
    .Attr("ranks: int >= 1 = 1")
    .Attr("is_shadow: bool = false")
    .Attr("is_exchanged: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], [], []"))
    .Doc(R"doc(
Says what becomes of the gradients of a table's rows from the next update on.

handle: scalar.
movement: scalar, in the unit of the rows: a deferred gradient is applied when that would move a
  value of its row so far (trigger "movement").
max_age: scalar, in updates: none is deferred longer.
max_rows: scalar: gradients deferred at most; those of other rows are applied at once.
mode: "apply" as they come; "mask": those of saturated rows are thrown away; "defer":
  they are summed per row, and a sum is applied as one gradient when it is due.
trigger: which rows' gradients are deferred: "movement": any row's; "interval": those of
  saturated rows.
decay_skipped: whether the moments of masked rows decay (Adam).
ranks: simulated ranks that share each batch evenly and defer gradients of their own.
is_shadow: nothing is masked or deferred, but what would have been is counted, for a sample of
  one in 16 keys. What was deferred before is applied when the mode, the trigger, the ranks or this
  changes.
is_exchanged: deferred gradients leave by SlipstreamCollectGradients and SlipstreamCollectDeferred
  only; an evaluation, a flush or an eviction leaves them where they are.
)doc");

REGISTER_OP("SlipstreamTableSetRowFlags")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("flags: uint8")
    .Attr("create_missing: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [?], [?]"))
    .Doc(R"doc(
Replaces the flags of a table's rows.

handle: scalar.
keys: [n]; rows that are not named have no flag.
flags: [n]; bit 0: saturated.
create_missing: whether keys without a row that get a flag get a row; else they are skipped.
)doc");

REGISTER_OP("SlipstreamTableUpdateCounts")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [11]"))
    .Doc(R"doc(
What became of a table's gradient rows (one per key, update and rank) so far.

handle: scalar.
counts: [11]: offered; sent (applied, deferred ones included); masked; deferred (added to a sum that
  stayed); of those sent: due by movement, due by age, flushed, over budget; deferred gradients
  whose row was evicted; those deferred now; their bytes.
)doc");

REGISTER_OP("SlipstreamTableFlush")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Applies all deferred gradients, each as one.

handle: scalar.
)doc");

REGISTER_OP("SlipstreamTableExportDeferred")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("ages: int64")
    .Output("ranks: int32")
    .Output("sums: float")
    .Output("learning_rate: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n], [n], [n], [n, d], []"))
    .Doc(R"doc(
The deferred gradients of a table; they stay.

handle: scalar.
keys: [n], in an order that SlipstreamTableImportDeferred takes.
ages: [n], updates of the table since the sum began.
ranks: [n], simulated ranks.
sums: [n, dim].
learning_rate: scalar, of the last update; a flush goes by it.
)doc");

REGISTER_OP("SlipstreamTableImportDeferred")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("ages: int64")
    .Input("ranks: int32")
    .Input("sums: float")
    .Input("learning_rate: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [?], [?], [?], [?, ?], []"))
    .Doc(R"doc(
Replaces the deferred gradients of a table; all or nothing.

handle: scalar. The table's policy must defer gradients, unless there are none.
keys: [n], each once per rank; with a row, unless they are exchanged.
ages: [n], the oldest first.
ranks: [n], simulated ranks.
sums: [n, dim].
learning_rate: scalar.
)doc");

REGISTER_OP("SlipstreamTableRowFlags")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("flags: uint8")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> [n]"))
    .Doc(R"doc(
The flags of rows; a row that left the table and came back has none.

handle: scalar.
keys: [n].
flags: [n], as SlipstreamTableSetRowFlags takes them; 0 for a key without a row.
)doc");

}  // namespace slipstream
