// Registrations of the ops on a table's update policy, deferred gradients and row flags.
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
Sets the update policy of a table from the next update on.

The mode decides how gradients are applied: at once, not at all if the row is saturated, or later as
a sum. A change of the mode, the trigger, the ranks, `is_shadow` or `is_exchanged` first applies all
deferred gradients. It is an error if they cannot be applied: gradients of a policy with
`is_exchanged` must be collected first.

handle: Scalar. The table.
movement: Scalar, at least 0, in the unit of the rows. With trigger "movement", a deferred sum is
  due when applying it would change a value of its row by this distance.
max_age: Scalar, at least 1. Number of updates after which a deferred sum is due.
max_rows: Scalar, at least 0. Maximum number of deferred sums. Each shard and simulated rank has an
  equal part of it. When the part is used up, gradients of further rows are applied at once.
mode: "apply": every gradient is applied at once. "mask": gradients of saturated rows are dropped.
  "defer": gradients are summed by row, and each sum is applied as one gradient when it is due.
trigger: With mode "defer", the rows whose gradients may be deferred. "movement": all rows.
  "interval": saturated rows.
decay_skipped: With mode "mask", whether the moments of masked rows (Adam, momentum) decay as with a
  gradient of 0.
ranks: Number of simulated ranks. Each has an equal part of every batch and its own deferred
  gradients.
is_shadow: Whether every gradient is applied at once, and the op only counts the gradients that the
  policy would mask or defer, for a sample of 1 in 16 keys.
is_exchanged: Whether deferred gradients leave the table only by SlipstreamCollectGradients and
  SlipstreamCollectDeferred. Evaluation and flushes then do not apply them, and they stay when their
  row is evicted.
)doc");

REGISTER_OP("SlipstreamTableSetRowFlags")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("flags: uint8")
    .Attr("create_missing: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [?], [?]"))
    .Doc(R"doc(
Replaces the flags of all rows of a table.

handle: Scalar. The table.
keys: [n]. Rows of other keys have no flags afterwards.
flags: [n]. Bit 0: the row is saturated. Other bits must be 0.
create_missing: Whether rows are created for keys that have a flag and no row. Otherwise these keys
  are ignored.
)doc");

REGISTER_OP("SlipstreamTableUpdateCounts")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [11]"))
    .Doc(R"doc(
Returns counts of the gradient rows of a table since its creation.

A gradient row is the gradient of one key in one update of one rank.

handle: Scalar. The table.
counts: [11]. Rows offered to the policy; rows sent, which are applied or collected, including
  deferred sums; rows masked; rows deferred, which are added to a sum that stays; four parts of the
  sent rows: due by movement, due by age, flushed, and over the budget of `max_rows`; deferred sums
  dropped because their row was evicted, removed or overwritten; current number of deferred sums;
  bytes of their memory.
)doc");

REGISTER_OP("SlipstreamTableFlush")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Applies all deferred gradients of a table, one gradient per key.

It does nothing if the policy sets `is_exchanged`.

handle: Scalar. The table.
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
Returns the deferred gradients of a table. They stay deferred.

handle: Scalar. The table.
keys: [n]. By shard and rank, the oldest sum first, as SlipstreamTableImportDeferred requires.
ages: [n]. Number of updates of the table since each sum began.
ranks: [n]. The simulated rank of each sum.
sums: [n, dim]. The deferred gradients.
learning_rate: Scalar. The learning rate of the last update, which a flush uses.
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
Replaces the deferred gradients of a table. After an error nothing has changed.

handle: Scalar. The table. Its policy must defer gradients, unless n is 0.
keys: [n]. Each at most once per rank. Every key must have a row, unless the policy sets
  `is_exchanged`.
ages: [n]. Number of updates since each sum began, at least 0. Within a shard and rank, the oldest
  sum comes first.
ranks: [n]. The simulated rank of each sum.
sums: [n, dim]. The deferred gradients; finite.
learning_rate: Scalar. Used by a flush before the next update.
)doc");

REGISTER_OP("SlipstreamTableRowFlags")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("flags: uint8")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> [n]"))
    .Doc(R"doc(
Returns the flags of rows. A row that was removed and created again has no flags.

handle: Scalar. The table.
keys: [n]. May repeat.
flags: [n]. As in SlipstreamTableSetRowFlags; 0 for a key without a row.
)doc");

}  // namespace slipstream
