// Adds up gradient rows of the same key.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MERGED_ROWS_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MERGED_ROWS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"

namespace slipstream {

// Adds up the rows of each key of a table in the order of `rows`, and writes the sums to `merged`,
// ordered by owner (OwnerOf), then by table, then by ascending key.
//
//   rows        Rows in any number of parts (`rows.ranks`); a key may occur in multiple parts.
//   row_floats  [tables]; floats per row.
//   ranks       Number of owners. With 1, all keys have one owner.
//
// Returns InvalidArgument if sizes, keys and values do not match. May throw std::bad_alloc.
Status MergeRows(const SendBufferView& rows, const std::vector<int64_t>& row_floats, int ranks,
                 SendBuffer* merged);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MERGED_ROWS_H_
