// Evicts rows of bounded tables for those that a batch needs.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Whether so many more keys, if all are distinct and new, do not fit in a bounded table.
inline bool MayOverflow(const EmbeddingTable& table, int64_t keys) {
  const int64_t capacity = table.options().capacity;
  return capacity > 0 && table.rows().size() + keys > capacity;
}

struct WantedKeys {
  EmbeddingTable* table;      // bounded
  std::vector<int64_t> keys;  // that are to have rows at once; may come several times
  bool is_access = false;     // whether keys that are too rare get no row
};

// Evicts as many rows as the keys need, none of a key that is wanted. who: for
// the error, e.g. "a batch needs". ResourceExhausted if a table cannot hold its keys:
// nothing is changed then. The caller holds the tables' mutexes.
Status EvictFor(std::vector<WantedKeys> wanted, const std::string& who);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_
