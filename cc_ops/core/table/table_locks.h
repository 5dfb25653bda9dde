// Locks several tables at once, in an order that cannot deadlock.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_TABLE_LOCKS_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_TABLE_LOCKS_H_

#include <algorithm>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Lock is std::unique_lock or std::shared_lock of std::shared_mutex. The tables
// must be distinct.
template <class Lock>
class TableLocks {
 public:
  explicit TableLocks(std::vector<EmbeddingTable*> tables) {
    std::sort(tables.begin(), tables.end(), std::less<EmbeddingTable*>());
    for (EmbeddingTable* table : tables) locks_.emplace_back(table->mutex());
  }

 private:
  std::vector<Lock> locks_;
};

using ExclusiveTableLocks = TableLocks<std::unique_lock<std::shared_mutex>>;
using SharedTableLocks = TableLocks<std::shared_lock<std::shared_mutex>>;

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_TABLE_LOCKS_H_
