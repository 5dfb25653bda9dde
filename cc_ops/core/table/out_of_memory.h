// Builds the error for failed allocations during work on tables.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_OUT_OF_MEMORY_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_OUT_OF_MEMORY_H_

#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Returns ResourceExhausted that names the table that could not grow, with its rows and bytes. If
// the exception is not a TableOutOfMemory, it names the largest of `tables`. Call it in the handler
// of std::bad_alloc, because it rethrows the exception to examine it, while holding the mutexes of
// the tables. doing: the action, for example "looking up a batch".
Status OutOfMemory(const std::string& doing, const std::vector<EmbeddingTable*>& tables);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_OUT_OF_MEMORY_H_
