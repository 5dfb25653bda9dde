// Registrations of the ops on native tables.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamTable")
    .Output("handle: resource")
    .Attr("table_name: string")
    .Attr("dim: int")
    .Attr("capacity: int = 0")
    .Attr("eviction: {'lfu', 'lru'} = 'lfu'")
    .Attr("initializer: {'zeros', 'constant', 'uniform', 'normal', 'truncated_normal'} = 'zeros'")
    .Attr("initializer_a: float = 0")
    .Attr("initializer_b: float = 0")
    .Attr("seed: int = 0")
    .Attr("rule: string = 'sgd'")
    .Attr("rule_parameters: list(float) = []")
    .Attr("transforms: list(float) = []")
    .Attr("dtype: {'float32', 'bfloat16', 'float16'} = 'float32'")
    .Attr("slot_dtype: {'float32', 'bfloat16'} = 'float32'")
    .Attr("memory: int = 0")
    .Attr("spill: string = ''")
    .Attr("admit_after: int = 1")
    .Attr("expire_after: int = 0")
    .Attr("expires_by_seconds: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("-> []"))
    .Doc(R"doc(
Creates an embedding table. It is deleted with the last copy of its handle.

table_name: Name of the table in error messages; not empty.
dim: Number of values per row, 1 to 65536.
capacity: Maximum number of rows; 0 means unbounded.
eviction: Rows to evict from a full table: those with the lowest access count (`lfu`), or those not
  used for the longest time (`lru`).
initializer: Initial value of a row. It depends only on the seed and the key.
initializer_a: For `constant` the value, for `uniform` the minimum, otherwise the mean.
initializer_b: For `uniform` the maximum, for `normal` and `truncated_normal` the standard
  deviation. `truncated_normal` is cut off at two standard deviations from the mean.
seed: Seed of the initializer.
rule: Name of the update rule, from core/update/rules/all_rules.h.
rule_parameters: All parameters of the update rule, in the order of its constructor in
  core/update/rules.
transforms: Empty, or the 6 settings of RowTransforms in core/update/rules/row_transforms.h, in the
  order there.
dtype: Data type of the rows in memory. Updates are computed in float32 and rounded stochastically.
slot_dtype: Data type of the optimizer's slots.
memory: Maximum bytes of rows in memory; other rows spill to disk. 0: all rows are in memory.
spill: Folder for spilled rows. Set it exactly if `memory` is above 0.
admit_after: Number of accesses after which a key gets a row, 1 to 255. Before that, lookups return
  the initial values of the key.
expire_after: Number of lookups of the table, or seconds, without access after which a row is
  removed, up to a quarter of that time later. 0: never.
expires_by_seconds: Whether `expire_after` is in seconds instead of lookups.
handle: Scalar. The new table.
)doc");

REGISTER_OP("SlipstreamTableGather")
    .Input("handle: resource")
    .Input("keys: int64")
    .Attr("dim: int >= 1")
    .Output("rows: float")
    .Output("found: bool")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> [n, dim], [n]"))
    .Doc(R"doc(
Reads rows by key, without creating rows or counting accesses.

The rows do not contain deferred gradients.

handle: Scalar. The table.
keys: [n]. May repeat.
dim: Values per row of the table.
rows: [n, dim]. A key without a row gets its initial values.
found: [n]. Whether the key has a row.
)doc");

REGISTER_OP("SlipstreamTableMeasure")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("snapshot: float")
    .Attr("metric: {'linf', 'l2'} = 'linf'")
    .Output("rows: float")
    .Output("found: bool")
    .Output("drift: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n, d] -> [n, d], [n], [n]"))
    .Doc(R"doc(
Reads rows by key, and computes their drift from a snapshot in the same pass.

handle: Scalar. The table.
keys: [n].
snapshot: [n, dim]. The rows at the start of the window.
metric: As in SlipstreamRowDrift.
rows: [n, dim]. The current rows, as in SlipstreamTableGather.
found: [n]. Whether the key has a row.
drift: [n]. Distance of each row of `rows` from its row of `snapshot`; not finite if either has a
  NaN or an infinity.
)doc");

REGISTER_OP("SlipstreamTableHotKeys")
    .Input("handle: resource")
    .Input("k: int64")
    .Output("keys: int64")
    .Output("counts: float")
    .Attr("by_key: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [] -> [m], [m]"))
    .Doc(R"doc(
Returns the keys with the highest decayed access counts above 0.

handle: Scalar. The table.
k: Scalar. Maximum number of keys.
keys: [m], m <= k. By descending count; keys with equal counts ascend.
counts: [m]. The access count of each key.
by_key: Whether the keys ascend instead, which takes less time.
)doc");

REGISTER_OP("SlipstreamTableDecayCounts")
    .Input("handle: resource")
    .Input("factor: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], []"))
    .Doc(R"doc(
Multiplies all access counts of a table by a factor.

handle: Scalar. The table.
factor: Scalar, 0 to 1.
)doc");

REGISTER_OP("SlipstreamTableStatistics")
    .Input("handle: resource")
    .Output("statistics: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [7]"))
    .Doc(R"doc(
Returns the size of a table and counts since its creation.

handle: Scalar. The table.
statistics: [7]. Rows; allocated bytes of memory; evicted rows; updates dropped because their key
  had lost its row since the lookup; number of entries that the hash index has memory for; expired
  rows; accesses of keys that were too rare for a row, once per batch and key.
)doc");

REGISTER_OP("SlipstreamTableSpillStatistics")
    .Input("handle: resource")
    .Output("statistics: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [6]"))
    .Doc(R"doc(
Returns the numbers of rows in memory and on disk, and of rows moved.

Counts of moved rows begin at the creation of the table.

handle: Scalar. The table.
statistics: [6]. Rows in memory; rows on disk only; bytes of files; rows read from disk; of these,
  rows that SlipstreamTablePrefetchRows requested; rows written to disk, including by compaction.
)doc");

REGISTER_OP("SlipstreamTablePrefetchRows")
    .Input("handle: resource")
    .Input("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n]"))
    .Doc(R"doc(
Starts to read rows from disk that a later lookup needs, without waiting for the disk.

It has no effect if the rows of the table do not spill to disk.

handle: Scalar. The table.
keys: [n]. Keys of the later lookup. They may repeat, and may be without a row.
)doc");

REGISTER_OP("SlipstreamTableStep")
    .Input("handle: resource")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> []"))
    .Doc(R"doc(
Returns the number of updates of a table.

handle: Scalar. The table.
step: Scalar. Number of updates since the creation of the table, or as imported.
)doc");

REGISTER_OP("SlipstreamTableRelease")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Frees the memory of a table that is still referenced, for example by a graph.

Later uses of the table are errors.

handle: Scalar. The table.
)doc");

REGISTER_OP("SlipstreamTableKeys")
    .Input("handle: resource")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n]"))
    .Doc(R"doc(
Returns the keys that have a row.

handle: Scalar. The table.
keys: [n]. Ascending.
)doc");

REGISTER_OP("SlipstreamTableWrite")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("rows: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n, d]"))
    .Doc(R"doc(
Replaces the values of rows, and creates rows for missing keys. It counts no access.

Existing rows keep their slots, counts and flags. Deferred gradients of the keys are dropped. A full
bounded table evicts other rows.

handle: Scalar. The table.
keys: [n]. Each at most once.
rows: [n, dim]. Values that are finite in the data type of the table.
)doc");

REGISTER_OP("SlipstreamTableRemove")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("removed: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> []"))
    .Doc(R"doc(
Removes rows with their slots, counts, flags and deferred gradients.

handle: Scalar. The table.
keys: [n]. Keys without a row are ignored.
removed: Scalar. Number of removed rows.
)doc");

REGISTER_OP("SlipstreamTableClear")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(Shapes("[]"))
    .Doc(R"doc(
Removes all rows with their slots, counts, flags and deferred gradients, and frees their memory.

It also clears the access counters of keys without a row. The numbers of updates and lookups do not
change.

handle: Scalar. The table.
)doc");

REGISTER_OP("SlipstreamTableShrink")
    .Input("handle: resource")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> []"))
    .Doc(R"doc(
Frees the memory of removed rows.

It moves the rows to new memory, which is allocated before the old memory is freed. A table that
spills to disk does not change.

handle: Scalar. The table.
bytes: Scalar. Number of freed bytes.
)doc");

REGISTER_OP("SlipstreamTableExport")
    .Input("handle: resource")
    .Attr("flushes: bool = true")
    .Output("keys: int64")
    .Output("rows: float")
    .Output("slots: float")
    .Output("counts: float")
    .Output("last_used: int64")
    .Output("steps: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n], [n, d], [n, s], [n], [?], [2]"))
    .Doc(R"doc(
Returns the content of a table, sorted by key.

handle: Scalar. The table.
flushes: Whether deferred gradients are applied first. Otherwise they stay deferred, and the rows do
  not contain them.
keys: [n].
rows: [n, dim].
slots: [n, slots per row]. Values of the optimizer.
counts: [n]. Decayed access counts.
last_used: [n] for bounded tables with LRU eviction and for tables with expiring rows: number of the
  lookup that last accessed the row or, with `expires_by_seconds`, the time in seconds since 1970.
  Otherwise [0].
steps: [2]. Number of updates and of lookups so far.
)doc");

REGISTER_OP("SlipstreamTableExportReplicas")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("counts: float")
    .Output("last_used: int64")
    .Output("steps: int64")
    .Output("flags: uint8")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n], [n], [?], [2], [n]"))
    .Doc(R"doc(
Returns the keys, access counts and flags of a table of replicas, sorted by key.

Deferred gradients stay. The values of the rows are not exported, because lookups request them from
their owners again.

handle: Scalar. The table. Its rows must not spill to disk.
keys: [n].
counts: [n]. Decayed access counts.
last_used: [n] or [0], as in SlipstreamTableExport.
steps: [2]. Number of updates and of lookups so far.
flags: [n]. Bit 0: the row is saturated.
)doc");

REGISTER_OP("SlipstreamTableExportChanges")
    .Input("handle: resource")
    .Input("since: int64")
    .Output("keys: int64")
    .Output("rows: float")
    .Output("slots: float")
    .Output("counts: float")
    .Output("last_used: int64")
    .Output("steps: int64")
    .Output("removed: int64")
    .Output("decays: float")
    .Output("is_all: bool")
    .Output("number: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [] -> [n], [n, d], [n, s], [n], [?], [2], [?], [?], [], []"))
    .Doc(R"doc(
Returns the rows that changed since the last run of this op. Deferred gradients stay.

All rows of the table must be in memory. The first run starts to track changes. If the L2 penalty or
the weight decay of the table changes every row at each update, the op always returns all rows.

handle: Scalar. The table.
since: Scalar. `number` of the last run. For any other value the op returns all rows.
keys: [n]. Keys of the changed and new rows, ascending.
rows: [n, dim].
slots: [n, slots per row]. Values of the optimizer.
counts: [n]. Decayed access counts.
last_used: [n] or [0], as in SlipstreamTableExport.
steps: [2]. Number of updates and of lookups so far.
removed: [m]. Keys that were removed. A key that was created again is also in `keys`. [0] if
  `is_all`.
decays: [k]. Factors by which the counts of the rows that are not in `keys` were multiplied, in
  order. [0] if `is_all`.
is_all: Scalar. Whether the op returned all rows.
number: Scalar. The number of this run, for `since` of the next run.
)doc");

REGISTER_OP("SlipstreamTableExportAdmission")
    .Input("handle: resource")
    .Output("counters: uint8")
    .Output("added: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n], [s]"))
    .Doc(R"doc(
Returns the approximate access counts of keys without a row, which decide about their admission.

handle: Scalar. The table.
counters: [64 * counters per shard]. The counters of CountFilter
  (core/containers/count_filter.h), shard by shard; [0] if no key without a row was accessed.
added: [64]. Number of accesses counted in each shard since its counters were last halved.
)doc");

REGISTER_OP("SlipstreamTableImportAdmission")
    .Input("handle: resource")
    .Input("counters: uint8")
    .Input("added: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [s]"))
    .Doc(R"doc(
Replaces the approximate access counts of keys without a row.

A table that admits every key at its first access ignores them.

handle: Scalar. The table.
counters: [n]. As returned by SlipstreamTableExportAdmission.
added: [64]. As returned by SlipstreamTableExportAdmission.
)doc");

REGISTER_OP("SlipstreamTableImport")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("rows: float")
    .Input("slots: float")
    .Input("counts: float")
    .Input("last_used: int64")
    .Input("steps: int64")
    .Attr("adds: bool = false")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [?], [?, ?], [?, ?], [?], [?], [?]"))
    .Doc(R"doc(
Replaces the content of a table with outputs of SlipstreamTableExport.

Flags and deferred gradients are dropped. After an error nothing has changed, with one exception: if
the rows of the table spill to disk and the disk has no room for all, the table has a part of the
new rows.

handle: Scalar. The table.
adds: Whether the rows are added to the existing rows, which must have other keys. Flags, deferred
  gradients and step numbers then stay. Only for tables whose rows spill to disk.
keys: [n]. Each at most once.
rows: [n, dim]. Values that are finite in the data type of the table.
slots: [n, slots per row]. Values of the optimizer, finite in the data type of the slots.
counts: [n]. Access counts, at least 0.
last_used: [n], as in SlipstreamTableExport, or [0] if it is not known.
steps: [2]. Number of updates and of lookups so far.
)doc");

}  // namespace slipstream
