// Sends gradient rows to the ranks that apply them.
//
//   CollectGradients    batch -> sums per key, by owner and table (SendBuffer)
//   ... exchanged by the caller, see message.h ...
//   ApplyRows           gradient rows of all ranks -> updated rows
//
// The gradients of a key are summed before they are sent. The update policy of a table may defer a
// sum; then a later step or CollectAllDeferred sends it. With ranks = 1 all ranks receive all rows,
// as for replicated tables. Otherwise a key's rows go to its owner (OwnerOf), as for sharded
// tables.
//
// # Invariants
//
// - No deferred gradient is lost. It leaves its table only after memory for the buffer was
//   reserved.
// - The order of the rows in a buffer depends on keys and batch, not on the number of threads.
//   Replicated tables therefore stay bit-identical on all ranks.
// - A call either changes all rows or, if it returns an error about its arguments, none.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PUSH_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PUSH_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/update/gradient_update.h"

namespace slipstream {

struct CollectOptions {
  LearningRates learning_rate;  // Used to compute how far a sum would move its row.
  int ranks = 1;                // Number of owners of keys; with 1, all rows go to all ranks.
  // Whether the collection counts as an update of the tables. Set it for tables of replicas,
  // because their gradients are applied by the owners.
  bool advance_step = false;
  // Whether gradients and sums that are not finite are allowed. The call then collects as if all
  // gradients were 0, removes due deferred gradients from the tables, and sets all values to NaN.
  bool passes_non_finite = false;
  // Called before any deferred gradient leaves its table. If it fails, no gradient has left.
  ReserveRows reserve = [](int64_t, int64_t, SendTarget*) { return OkStatus(); };
};

// Sums the gradients of each distinct key, like ApplyGradients, and collects the sums of this batch
// that the policies do not defer, and deferred sums that are due. A key's rows go to its owner;
// with ranks = 1 they go to all ranks. Rows are ordered by shard.
//
// Returns InvalidArgument for a gradient or sum that is not finite, unless `passes_non_finite`; no
// gradient was deferred or collected then. Takes the mutexes of the tables.
Status CollectGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                        const CollectOptions& options, const Parallel& parallel,
                        SendBuffer* buffer);

// Collects all deferred gradients of the tables, except that a shadow policy drops them. Uses only
// `ranks` and `reserve` of the options. Takes the mutexes of the tables.
Status CollectAllDeferred(const std::vector<EmbeddingTable*>& tables, const CollectOptions& options,
                          SendBuffer* buffer);

struct ApplyOptions {
  LearningRates learning_rate;
  std::vector<float> scale = {};  // [tables]; factor of the sums. Empty means 1.
  // If true, a key without a row gets a row, which does not count as an access. If false, its
  // gradients are counted as dropped updates.
  bool create_missing = true;
};

// Applies the gradient rows of all ranks. The call is one update of every table. It adds the rows
// of a key in the order of the buffer and applies the sum once. Returns InvalidArgument if sizes,
// keys and values do not match, or if a value, a scale or an updated row is not finite; no row is
// changed then. Takes
// the mutexes of the tables.
Status ApplyRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                 const ApplyOptions& options, const Parallel& parallel);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PUSH_H_
