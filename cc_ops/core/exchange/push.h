// Gradient rows on their way between ranks: collected from a batch, put into a send buffer by rank
// and table, and applied where they arrive.
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
  LearningRates learning_rate;  // decides how far a sum would move its row
  int ranks = 1;
  // Whether this is an update of the tables, whose rows are then applied to others, instead of
  // being applied to them.
  bool advance_step = false;
  // A gradient that is not finite is then no error: what is collected is as if all gradients were
  // 0, deferred ones that are due leave their tables, and all values are NaN.
  bool passes_non_finite = false;
  // Called before any deferred gradient leaves its table. On its error nothing has left.
  ReserveRows reserve = [](int64_t, int64_t, SendTarget*) { return OkStatus(); };
};

// Sums the gradients of each distinct key, as ApplyGradients does, and collects what
// the tables' policies do not defer: the sums of this batch, or deferred ones that are due. A
// key's rows go to the rank that owns it; with ranks = 1 all go to everybody. The order of rows,
// by shard, does not depend on the number of threads. InvalidArgument on a
// gradient that is not finite, unless these pass: nothing is deferred or collected then. Takes the
// tables' mutexes.
Status CollectGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                        const CollectOptions& options, const Parallel& parallel,
                        SendBuffer* buffer);

// Collects every deferred gradient of the tables. Takes the tables' mutexes.
Status CollectAllDeferred(const std::vector<EmbeddingTable*>& tables, const CollectOptions& options,
                          SendBuffer* buffer);

struct ApplyOptions {
  LearningRates learning_rate;
  std::vector<float> scale = {};  // [tables], multiplies the sums; empty: 1
  // Whether a key without a row gets one, without an access; else its rows are counted as dropped
  // updates.
  bool create_missing = true;
};

// Applies gradient rows: those of a key are added in the order in which they come, and applied as
// one gradient in one update of every table. InvalidArgument if sizes, keys and values do not fit
// together, or a value or scale is not finite: no row is changed then. Takes the mutexes.
Status ApplyRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                 const ApplyOptions& options, const Parallel& parallel);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PUSH_H_
