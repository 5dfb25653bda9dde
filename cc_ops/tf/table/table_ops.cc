// Registrations of the native store's ops on tables.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamTable")
    .Output("handle: resource")
    .Attr("table_name: string")
    .Attr("dim: int")
    .Attr("capacity: int = 0")
    .Attr("eviction: {'lfu', 'lru'} = 'lfu'")
    .Attr("initializer: {'zeros', 'constant', 'uniform', 'normal'} = 'zeros'")
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
Makes an embedding table, which lives as long as its last handle.

table_name: for messages.
dim: values per row.
capacity: most rows; 0 grows without bound.
eviction: which rows leave a full table: lowest access count or longest unused.
initializer: how a new key's row starts, a function of (seed, key).
initializer_a: constant: value; uniform: low; normal: mean.
initializer_b: uniform: high; normal: standard deviation.
seed: of the initializer.
rule: the sparse optimizer, a name of core/update/rules/all_rules.h.
rule_parameters: of the rule, in the order of its file there.
transforms: none, or what is done beside the rule, in the order of core/update/rules/row_transforms.h.
dtype: of a row's values in memory; they are computed on as floats, and rounded by chance.
slot_dtype: of the optimizer's values beside them.
memory: bytes of rows in memory where others spill to the disk; 0: all are in memory.
spill: folder on the disk; empty without memory.
admit_after: accesses until a key gets a row; until then it reads its initial row.
expire_after: lookups, or seconds, without an access until a row leaves, at the latest a quarter
  more; 0: never.
expires_by_seconds: else by lookups.
handle: scalar.
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
Reads rows by key, without making or counting any.

handle: scalar.
keys: [n].
dim: that of the table.
rows: [n, dim]; an absent key gives its initial row.
found: [n], whether the key is there.
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
Reads rows by key as SlipstreamTableGather does, and measures how far they have come.

handle: scalar.
keys: [n].
snapshot: [n, dim], the rows at the start of the window.
metric: as in SlipstreamRowDrift.
rows: [n, dim]; an absent key gives its initial row.
found: [n], whether the key is there.
drift: [n]. A row with a NaN or an infinity in either has a non-finite drift.
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
The keys with the highest decayed access counts above 0; of equal counts, the smaller keys.

handle: scalar.
k: scalar, at most so many.
keys: [m <= k], by count descending, then key ascending.
counts: [m].
by_key: keys are ascending, whatever their counts; that takes less time.
)doc");

REGISTER_OP("SlipstreamTableDecayCounts")
    .Input("handle: resource")
    .Input("factor: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], []"))
    .Doc(R"doc(
Multiplies all access counts of a table.

handle: scalar.
factor: scalar, 0 to 1.
)doc");

REGISTER_OP("SlipstreamTableStatistics")
    .Input("handle: resource")
    .Output("statistics: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [7]"))
    .Doc(R"doc(
Size of a table.

handle: scalar.
statistics: [7]: rows; bytes allocated; rows evicted so far; updates dropped because
  their key was evicted between lookup and update; keys that the index has memory for; rows expired
  so far; accesses of keys that were too rare to have a row, each batch's of a key once.
)doc");

REGISTER_OP("SlipstreamTableSpillStatistics")
    .Input("handle: resource")
    .Output("statistics: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [6]"))
    .Doc(R"doc(
Where the rows of a table are, and how many moved since it was made.

handle: scalar.
statistics: [6]: rows in memory; rows on disk alone; bytes of files; rows read; those of them whose
  reading had begun before they were needed; rows written.
)doc");

REGISTER_OP("SlipstreamTableAnnounce")
    .Input("handle: resource")
    .Input("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n]"))
    .Doc(R"doc(
Begins to read rows from the disk that a lookup will need; does nothing where rows do not spill.

handle: scalar.
keys: [n], any.
)doc");

REGISTER_OP("SlipstreamTableStep")
    .Input("handle: resource")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> []"))
    .Doc(R"doc(
How often a table was updated.

handle: scalar.
step: scalar.
)doc");

REGISTER_OP("SlipstreamTableKeys")
    .Input("handle: resource")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n]"))
    .Doc(R"doc(
The keys that have a row.

handle: scalar.
keys: [n], ascending.
)doc");

REGISTER_OP("SlipstreamTableWrite")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("rows: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [n, d]"))
    .Doc(R"doc(
Replaces the values of rows, and makes those of absent keys; counts no access.

Slots, counts and flags of rows that are there stay, their deferred gradients go. A full bounded
table evicts other rows.

handle: scalar.
keys: [n], each once.
rows: [n, dim], finite.
)doc");

REGISTER_OP("SlipstreamTableRemove")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("removed: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n] -> []"))
    .Doc(R"doc(
Removes rows with their slots, counts, flags and deferred gradients.

handle: scalar.
keys: [n]; those without a row are ignored.
removed: scalar, how many rows there were.
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
All of a table, sorted by key.

handle: scalar.
flushes: whether deferred gradients are applied before; else they stay, and are not in the rows.
keys: [n].
rows: [n, dim].
slots: [n, slots per row], the optimizer's.
counts: [n], decayed access counts.
last_used: [n], number of the last lookup, or seconds since 1970, for tables bounded by LRU or whose
  rows expire; else [0].
steps: [2]: updates, lookups so far.
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
Keys, access counts and flags of a table of replicas, sorted by key; nothing is flushed. The rows are
not exported, because lookups request them again.

handle: scalar.
keys: [n].
counts: [n], decayed access counts.
last_used: [n] or [0], as of SlipstreamTableExport.
steps: [2]: updates, lookups so far.
flags: [n], RowFlag bits.
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
What became of a table's rows since this op was run before; nothing is flushed. The table is in
memory.

handle: scalar.
since: scalar, the number of that run; of any but the last one, or another number, all rows come.
keys, rows, slots, counts, last_used: of rows that changed or are new, as of SlipstreamTableExport.
steps: [2]: updates, lookups so far.
removed: [m], keys that have left; some may be back, and in keys.
decays: [d], factors by which the counts of all other rows were multiplied, in turn.
is_all: scalar, whether these are all rows, whatever changed.
number: scalar, of this run.
)doc");

REGISTER_OP("SlipstreamTableExportAdmission")
    .Input("handle: resource")
    .Output("counters: uint8")
    .Output("added: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [n], [s]"))
    .Doc(R"doc(
What a table knows of keys that are too rare to have a row.

handle: scalar.
counters: [n], of a filter, shard after shard; [0]: there was no such key.
added: [s], accesses of each shard since its counters were halved.
)doc");

REGISTER_OP("SlipstreamTableImportAdmission")
    .Input("handle: resource")
    .Input("counters: uint8")
    .Input("added: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [n], [s]"))
    .Doc(R"doc(
Replaces what a table knows of keys that are too rare to have a row. A table where no key is forgets
it.

handle: scalar.
counters: [n], as SlipstreamTableExportAdmission gave them.
added: [s].
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
Replaces all of a table by what SlipstreamTableExport gave; all or nothing.

handle: scalar.
adds: the rows come beside those that are there, of other keys; of a table whose rows spill to the
  disk, which may have some of them if there is no room for all.
keys: [n], each once.
rows: [n, dim].
slots: [n, slots per row].
counts: [n].
last_used: [n] or [0].
steps: [2].
)doc");

}  // namespace slipstream
