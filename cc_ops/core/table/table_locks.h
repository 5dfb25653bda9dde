// Locks multiple tables in a fixed order, so that threads cannot deadlock.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_TABLE_LOCKS_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_TABLE_LOCKS_H_

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Locks tables in the order of their addresses. Lock is std::unique_lock or std::shared_lock of
// std::shared_mutex. The tables must be distinct.
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

// Returns whether any of the tables spills rows to disk.
inline bool AnySpilled(const std::vector<EmbeddingTable*>& tables) {
  return std::any_of(tables.begin(), tables.end(), [](const EmbeddingTable* table) {
    return table->rows().spilled() != nullptr;
  });
}

// Locks tables for reading: shared, or exclusively if a table spills, because reading then loads
// rows from disk.
class ReadingTableLocks {
 public:
  explicit ReadingTableLocks(const std::vector<EmbeddingTable*>& tables) {
    if (AnySpilled(tables)) {
      exclusive_.emplace(tables);
    } else {
      shared_.emplace(tables);
    }
  }

 private:
  std::optional<SharedTableLocks> shared_;
  std::optional<ExclusiveTableLocks> exclusive_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_TABLE_LOCKS_H_
