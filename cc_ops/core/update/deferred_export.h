// Exports the deferred gradients of a table to arrays, and imports them.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/deferral/deferred_contents.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Exports by shard, then by simulated rank, then oldest first. Ages count updates of the table.
// Callers of both functions hold the mutex of the table exclusively.
DeferredContents ExportDeferred(EmbeddingTable* table);

// Replaces all deferred gradients. Returns InvalidArgument, without changes:
//
// - in the cases of CheckDeferred, and if the arrays differ in length,
// - if there are gradients but the policy does not defer, or has no such rank,
// - if a key is repeated for a rank, or is younger than the next key of its shard and rank,
// - if a key has no row, unless the policy sets `is_exchanged`.
//
// A shadow policy ignores keys that it does not sample. Throws std::bad_alloc (strong exception
// guarantee).
Status ImportDeferred(EmbeddingTable* table, const DeferredContents& contents);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_DEFERRED_EXPORT_H_
