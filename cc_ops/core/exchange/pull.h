// Rows that ranks request, read where they are owned.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/pulled_rows.h"

namespace slipstream {

// Reads the rows of keys, in their order.
struct PullOptions {
  // True: keys without a row get one, and each key counts as accessed once. False: they give the
  // rows that they would start with.
  bool create_missing = false;
  int64_t most_rank_bytes = kMostMessageBytes;  // of rows
  RowFormat format;
  Parallel parallel;
};
struct PulledRows {
  std::vector<uint8_t> messages;   // see pulled_rows.h, that to rank 0 first
  std::vector<int32_t> lengths;    // [ranks], bytes of each
  std::vector<int64_t> row_bytes;  // [ranks], of these, the rows'
};
// ResourceExhausted: a bounded table cannot hold the rows, or they are too many bytes. Takes the
// mutexes.
Status PullRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& requests,
                const PullOptions& options, SteadyLengths* lengths, PulledRows* pulled);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_
