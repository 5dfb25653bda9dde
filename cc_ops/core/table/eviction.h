// Evicts rows of bounded tables to make room for the rows of a batch.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Returns whether `keys` more keys would exceed the capacity of a bounded table if all of them were
// distinct and new.
inline bool MayOverflow(const EmbeddingTable& table, int64_t keys) {
  const int64_t capacity = table.options().capacity;
  return capacity > 0 && table.rows().size() + keys > capacity;
}

struct WantedKeys {
  EmbeddingTable* table;      // Must be bounded.
  std::vector<int64_t> keys;  // Keys that need rows at the same time; may repeat.
  // Whether the keys are accessed in a lookup, in which keys that are too rare for admission need
  // no row.
  bool is_access = false;
};

// Evicts rows of each table so that all of its wanted keys fit in the capacity. Rows of wanted keys
// stay. who: start of the error message, for example "a batch needs". Returns ResourceExhausted if
// the wanted keys of a table exceed its capacity; no table is changed then. The caller holds the
// mutexes of the tables exclusively.
Status EvictFor(std::vector<WantedKeys> wanted, const std::string& who);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_EVICTION_H_
