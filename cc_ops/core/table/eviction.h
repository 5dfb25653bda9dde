// Evicts rows of bounded tables to make room for the rows of a batch.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Whether `keys` more keys could exceed the capacity, if all are distinct and new.
inline bool MayOverflow(const EmbeddingTable& table, int64_t keys) {
  const int64_t capacity = table.options().capacity;
  return capacity > 0 && table.rows().size() + keys > capacity;
}

struct WantedKeys {
  EmbeddingTable* table;      // Must be bounded.
  std::vector<int64_t> keys;  // Keys that need rows at the same time; may repeat.
  bool is_access = false;     // Whether rare keys get no row.
};

// Evicts as many rows as the wanted keys need, but no wanted key. `who` starts the error message,
// for example "a batch needs". Returns ResourceExhausted if a table cannot hold its keys; no table
// is changed then. The caller holds the mutexes of the tables.
Status EvictFor(std::vector<WantedKeys> wanted, const std::string& who);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_
