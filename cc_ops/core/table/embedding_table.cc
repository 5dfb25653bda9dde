#include "cc_ops/core/table/embedding_table.h"

#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/table/eviction.h"

namespace slipstream {

int64_t EmbeddingTable::bytes() const {
  return rows_.bytes() + flags_.bytes() + updates_.deferred_bytes() + replicas_.bytes();
}

Status EmbeddingTable::SetFlags(const int64_t* keys, const uint8_t* flags, int64_t n,
                                const Parallel& parallel, bool create_missing) {
  std::vector<int64_t> wanted;
  for (int64_t i = 0; i < n; ++i) {
    if ((flags[i] & ~kAllFlags) != 0) {
      return InvalidArgument("the flags of key " + std::to_string(keys[i]) + " of table '" +
                             options_.name + "', at index " + std::to_string(i) + ", are " +
                             std::to_string(flags[i]) + "; allowed: 0 to " +
                             std::to_string(kAllFlags) + ". No flag was set");
    }
    if (create_missing && options_.capacity > 0 && flags[i] != 0) wanted.push_back(keys[i]);
  }
  if (MayOverflow(*this, static_cast<int64_t>(wanted.size()))) {
    const Status status = EvictFor({{this, std::move(wanted)}}, "rows with flags need");
    if (!status.ok()) return status;
  }
  flags_.Set(keys, flags, n, parallel, create_missing, &rows_);
  return OkStatus();
}

void EmbeddingTable::Evict(int64_t incoming, const std::vector<int64_t>& pinned) {
  const std::vector<int64_t> evicted = rows_.KeysToEvict(incoming, pinned);
  for (const int64_t key : evicted) {
    uint32_t index = 0;
    rows_.Find(key, &index);
    flags_.Clear(key, index);
    updates_.DropDeferred(key);
  }
  rows_.Remove(evicted);
}

TableContents EmbeddingTable::Export() const {
  TableContents contents = rows_.Export();
  contents.update_step = updates_.step();
  return contents;
}

Status EmbeddingTable::Import(const TableContents& contents) {
  const Status status = rows_.Import(contents);
  if (!status.ok()) return status;
  flags_.Clear();
  updates_.DropAllDeferred();
  updates_.set_step(contents.update_step);
  return OkStatus();
}

}  // namespace slipstream
