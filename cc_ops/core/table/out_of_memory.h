// What is said where memory ran out while tables were at work.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_OUT_OF_MEMORY_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_OUT_OF_MEMORY_H_

#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// ResourceExhausted that names the table that could not grow or, where it was none, the largest
// tables; with their rows and bytes. To be called where std::bad_alloc is caught; the caller holds
// the tables' mutexes. doing: e.g. "looking up a batch".
Status OutOfMemory(const std::string& doing, const std::vector<EmbeddingTable*>& tables);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_OUT_OF_MEMORY_H_
