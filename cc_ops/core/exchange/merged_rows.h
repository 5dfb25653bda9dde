// Rows of the same key, added up.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MERGED_ROWS_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MERGED_ROWS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"

namespace slipstream {

// Adds up the rows of each key and table, in the order given, and puts the sums by owner, then by
// table, then by key. rows: of any parts. row_floats: [tables], of a row. ranks: that own keys; 1:
// one has all. InvalidArgument if sizes, keys and values do not fit together. May throw
// std::bad_alloc.
Status MergeRows(const SendBufferView& rows, const std::vector<int64_t>& row_floats, int ranks,
                 SendBuffer* merged);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MERGED_ROWS_H_
