// A table's pending updates as arrays, to be kept in a checkpoint, and back.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_PENDING_UPDATES_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_PENDING_UPDATES_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Of each shard and simulated rank, oldest first.
struct PendingUpdates {
  std::vector<int64_t> keys;   // [n]
  std::vector<int64_t> ages;   // [n]: updates of the table since the sum began
  std::vector<int32_t> ranks;  // [n]: simulated ranks
  std::vector<float> sums;     // [n, dim]
};

// Callers hold the table's mutex exclusively.
PendingUpdates ExportPending(EmbeddingTable* table);

// Replaces all held sums. InvalidArgument, and nothing is changed, if the arrays differ in length,
// the policy does not hold sums of such a rank or key, a sum of a key comes twice, an age is
// negative, above 2^48 or above that of a sum before it in its shard, a sum is not finite, or a key
// has no row in a table that applies its sums itself. Throws std::bad_alloc, leaving all as it was.
Status ImportPending(EmbeddingTable* table, const PendingUpdates& pending);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_PENDING_UPDATES_H_
