#include "cc_ops/core/exchange/buffer_parts.h"

#include <utility>

#include "cc_ops/core/table/eviction.h"

namespace slipstream {

Status EvictForParts(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                     int ignored_rank, bool is_access) {
  std::vector<WantedKeys> wanted;
  for (EmbeddingTable* bounded : tables) {
    if (!MayOverflow(*bounded, buffer.num_keys)) continue;
    std::vector<int64_t> keys;
    ForEachPart(tables, buffer, [&](const BufferPart& part) {
      if (part.table != bounded || part.rank == ignored_rank) return;
      keys.insert(keys.end(), part.keys, part.keys + part.rows);
    });
    wanted.push_back({bounded, std::move(keys), is_access});
  }
  return EvictFor(std::move(wanted), "the ranks' batches need");
}

}  // namespace slipstream
