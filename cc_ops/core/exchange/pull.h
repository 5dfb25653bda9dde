// Reads the rows that ranks request, on the rank that owns them.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/pulled_rows.h"

namespace slipstream {

// Options of PullRows, which reads rows in the order of their keys.
struct PullOptions {
  // If true, missing rows are created and each key counts one access. If false, missing rows have
  // their initial values.
  bool create_missing = false;
  int64_t most_rank_bytes = kMostMessageBytes;  // Maximum bytes of rows per rank.
  RowFormat format;
  Parallel parallel;
};
struct PulledRows {
  std::vector<uint8_t> messages;   // Encoded as pulled_rows.h describes, by rank.
  std::vector<int32_t> lengths;    // [ranks]; bytes of each message.
  std::vector<int64_t> row_bytes;  // [ranks]; bytes of the rows in each message.
};
// Returns ResourceExhausted if a bounded table cannot hold the rows, or if the rows are too many
// bytes. Takes the mutexes of the tables.
Status PullRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& requests,
                const PullOptions& options, SteadyLengths* lengths, PulledRows* pulled);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_
