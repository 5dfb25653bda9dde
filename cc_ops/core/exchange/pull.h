// Rows of tables that are sharded over ranks: requested from their owners, read there, and stored
// as replicas where they are looked up. Slots travel where a replica must tell how far a gradient
// would move its row.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/pulled_rows.h"
#include "cc_ops/core/exchange/push.h"
#include "cc_ops/core/lookup/feature_view.h"

namespace slipstream {

// The distinct keys of a batch that must be requested, by owner: all without a read-only replica.
// replicas: the tables that the batch will be looked up in. `requests` gets sizes and keys. Takes
// the mutexes.
struct RouteOptions {
  int ranks = 1;
  bool skip_read_only = true;  // false requests those, too
};
Status RouteKeys(const std::vector<EmbeddingTable*>& replicas,
                 const std::vector<FeatureView>& features, const RouteOptions& options,
                 const Parallel& parallel, SendBuffer* requests);

// Reads the rows of keys, in their order.
struct PullOptions {
  // True: keys without a row get one, and each key counts as accessed once. False: they give the
  // rows that they would start with.
  bool create_missing = false;
  int64_t most_rank_bytes = kMostMessageBytes;  // of rows
  RowFormat format;
};
// ResourceExhausted: a bounded table cannot hold the rows, or they are too many bytes. Takes the
// mutexes.
struct PulledRows {
  std::vector<uint8_t> messages;   // see pulled_rows.h, that to rank 0 first
  std::vector<int32_t> lengths;    // [ranks], bytes of each
  std::vector<int64_t> row_bytes;  // [ranks], of these, the rows'
};
Status PullRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& requests,
                const PullOptions& options, SteadyLengths* lengths, PulledRows* pulled);

// Stores rows that were pulled, without counting accesses. Without slots, a replica's are 0, beside
// which no movement is underestimated.
struct ReplicaOptions {
  bool read_only = false;  // flag them kReadOnlyReplica
  int ignored_rank = -1;   // a rank whose rows are not stored
  bool evict = false;      // bounded tables evict others for them; else a lookup must follow that
                           // does so
};
// InvalidArgument if the messages are not those of the keys' rows, or a value is not finite:
// nothing is stored then. Takes the mutexes.
Status StoreReplicas(const std::vector<EmbeddingTable*>& replicas, const SendBufferView& keys,
                     const uint8_t* messages, int64_t num_bytes, const ReplicaOptions& options);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_
