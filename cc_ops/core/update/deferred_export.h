// Exports the deferred gradients of a table to arrays, and imports them.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/deferral/deferred_contents.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Exports by shard and simulated rank, oldest first; ages count updates of the table. Callers hold
// the mutex of the table exclusively, here and below.
DeferredContents ExportDeferred(EmbeddingTable* table);

// Replaces all deferred gradients. Returns InvalidArgument, without changes, in the cases of
// CheckDeferred, if the arrays differ in length, if the policy does not defer gradients of such a
// rank or key, if a key is repeated for a rank, if an age is above the previous one in its shard,
// or if a key has no row in a table that applies its gradients itself. Throws std::bad_alloc
// (strong exception guarantee).
Status ImportDeferred(EmbeddingTable* table, const DeferredContents& contents);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_
