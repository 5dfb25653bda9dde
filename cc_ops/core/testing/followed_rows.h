// For tests: a replica of a table's rows. RowStore::TakeChanges returns the changes to apply to it.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_FOLLOWED_ROWS_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_FOLLOWED_ROWS_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

struct FollowedRow {
  std::vector<uint32_t> values;  // Values and slots as bits.
  float count = 0.f;
  int64_t last_used = 0;
  bool operator==(const FollowedRow& other) const {
    return values == other.values && count == other.count && last_used == other.last_used;
  }
};

using RowsByKey = std::map<int64_t, FollowedRow>;

// Returns the rows of the given entries of a table; empty if the export fails.
inline RowsByKey RowsOf(const EmbeddingTable& table, const std::vector<HashIndex::Entry>& entries) {
  const auto dim = static_cast<size_t>(table.dim());
  const auto slots = static_cast<size_t>(table.slots_per_row());
  TableContents contents;
  contents.keys.resize(entries.size());
  contents.rows.resize(entries.size() * dim);
  contents.slots.resize(entries.size() * slots);
  contents.counts.resize(entries.size());
  contents.last_used.resize(entries.size());
  const ContentsRoom room = {contents.keys.data(), contents.rows.data(), contents.slots.data(),
                             contents.counts.data(), contents.last_used.data()};
  RowsByKey rows;
  if (!table.rows().Export(entries, room).ok()) return rows;
  for (size_t i = 0; i < entries.size(); ++i) {
    FollowedRow& row = rows[contents.keys[i]];
    row.values.resize(dim + slots);
    std::memcpy(row.values.data(), &contents.rows[i * dim], dim * sizeof(float));
    if (slots > 0) {
      std::memcpy(&row.values[dim], &contents.slots[i * slots], slots * sizeof(float));
    }
    row.count = contents.counts[i];
    row.last_used = contents.last_used[i];
  }
  return rows;
}

struct FollowedRows {
  // Applies the changes of the table since the last call to `rows`. Returns the changes.
  RowChanges Follow(EmbeddingTable* table) {
    RowChanges changes = table->rows().TakeChanges(number);
    if (changes.is_all) rows.clear();
    for (const int64_t key : changes.removed) rows.erase(key);
    for (const float factor : changes.decays) {
      for (auto& [key, row] : rows) row.count *= factor;
    }
    for (auto& [key, row] : RowsOf(*table, changes.rows)) rows[key] = row;
    number = changes.number;
    return changes;
  }

  int64_t number = 0;  // RowChanges::number of the last call to TakeChanges.
  RowsByKey rows;      // The replica.
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_FOLLOWED_ROWS_H_
