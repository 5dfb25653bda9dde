// Reads the rows that ranks request, on the rank that owns them.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/pulled_rows.h"

namespace slipstream {

struct PullOptions {
  // If true, the call is a lookup of the tables: missing rows are created, unless their key is too
  // rare for a row, and each key counts one access. If false, missing rows have their initial
  // values.
  bool create_missing = false;
  bool joins_step = false;                    // See EmbeddingTable::BeginLookup.
  int64_t max_rank_bytes = kMaxMessageBytes;  // Maximum bytes of rows per rank.
  RowFormat format;
  Parallel parallel;
};
struct PulledRows {
  std::vector<uint8_t> messages;   // Encoded as pulled_rows.h describes, by rank.
  std::vector<int32_t> lengths;    // [ranks]; bytes of each message.
  std::vector<int64_t> row_bytes;  // [ranks]; bytes of the rows in each message.
};
// Reads the rows of the requested keys and encodes one message for each rank. requests: the keys by
// the rank that requests them. lengths: chooses the lengths of the messages.
//
// Returns InvalidArgument if the sizes and keys of the requests do not match, the errors of
// RowStore::LoadRow, and ResourceExhausted if a bounded table cannot hold the rows, or if the rows
// for a rank exceed `max_rank_bytes`. Takes the mutexes of the tables.
Status PullRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& requests,
                const PullOptions& options, SteadyLengths* lengths, PulledRows* pulled);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULL_H_
