// A table's deferred gradients as arrays, and back.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/deferral/deferred_contents.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Of each shard and simulated rank, oldest first; ages in updates of the table. Callers hold the
// table's mutex exclusively, here and below.
DeferredContents ExportDeferred(EmbeddingTable* table);

// Replaces all deferred gradients. InvalidArgument, and nothing is changed, as CheckDeferred, and
// if the arrays differ in length, the policy defers none of such a rank or key, a key comes twice
// for a rank, an age is above that of one before it in its shard, or a key has no row in a table
// that applies its gradients itself. Throws std::bad_alloc, leaving all as it was.
Status ImportDeferred(EmbeddingTable* table, const DeferredContents& contents);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_
