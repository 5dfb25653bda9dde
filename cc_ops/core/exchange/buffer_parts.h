// Iterates over the parts of a send buffer by rank and table.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_BUFFER_PARTS_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_BUFFER_PARTS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/exchange/send_buffer.h"
#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/update/update_loop.h"

namespace slipstream {

// The keys of one table and rank.
struct BufferPart {
  EmbeddingTable* table;
  int rank;
  const int64_t* keys;  // [rows]
  int64_t rows;
};

// Calls fn(part) for every part of a valid buffer (CheckSendBuffer), by rank, then by table.
template <class Fn>
void ForEachPart(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer, Fn fn) {
  const int64_t *keys = buffer.keys, *rows = buffer.sizes;
  for (int rank = 0; rank < buffer.ranks; ++rank) {
    for (EmbeddingTable* table : tables) {
      fn(BufferPart{table, rank, keys, *rows});
      keys += *rows++;
    }
  }
}

// Finds the row of each key of a part, and calls use(i, found) for the keys in order.
//
//   find(i, &index)  Returns the StoredRow of key i, or null, and sets its index within the shard.
//   use(i, found)    Receives both results as a FoundRow.
//
// `find` runs some keys ahead of `use` and the found rows are prefetched, so that a row is in the
// cache when it is used.
template <class Find, class Use>
void FindAhead(const BufferPart& part, Find find, Use use) {
  // Prefetch the line of the hash index of a key first, then its row.
  constexpr int64_t kKeysAhead = 16, kRowsAhead = 8;
  RowStore& rows = part.table->rows();
  const int64_t row_bytes = rows.layout().bytes();
  FoundRow found[kRowsAhead];
  for (int64_t i = 0; i < part.rows + kRowsAhead; ++i) {
    FoundRow& next = found[i % kRowsAhead];
    if (i >= kRowsAhead) use(i - kRowsAhead, next);
    if (i >= part.rows) continue;
    if (i + kKeysAhead < part.rows) rows.Prefetch(part.keys[i + kKeysAhead]);
    next.row = find(i, &next.index);
    if (next.row != nullptr) PrefetchBytes(next.row, row_bytes);
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_BUFFER_PARTS_H_
