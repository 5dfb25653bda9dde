#include "cc_ops/core/exchange/pull.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/exchange/buffer_parts.h"
#include "cc_ops/core/table/eviction.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"

namespace slipstream {
namespace {

// Packs the rows of a part.
void PackPart(const BufferPart& part, const PullOptions& options, std::vector<uint8_t>* bytes) {
  EmbeddingTable* table = part.table;
  RowPacker packer(*table, options.format, part.rows, bytes);
  const auto find = [&](int64_t i, uint32_t* index) {
    return options.create_missing ? table->rows().FindOrAdmit(part.keys[i], 1.f, index)
                                  : table->rows().Find(part.keys[i], index);
  };
  FindAhead(part, find,
            [&](int64_t i, const FoundRow& found) { packer.Add(part.keys[i], found.row); });
}

// Returns the keys of a table in the requests of all ranks.
std::vector<int64_t> KeysOf(const std::vector<EmbeddingTable*>& tables,
                            const SendBufferView& requests, const EmbeddingTable* table) {
  std::vector<int64_t> keys;
  ForEachPart(tables, requests, [&](const BufferPart& part) {
    if (part.table == table) keys.insert(keys.end(), part.keys, part.keys + part.rows);
  });
  return keys;
}

}  // namespace

Status PullRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& requests,
                const PullOptions& options, SteadyLengths* lengths, PulledRows* pulled) {
  Status status = CheckSendBuffer(tables, requests, std::vector<int64_t>(tables.size(), 0));
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(tables);
  try {
    if (options.create_missing) {
      std::vector<WantedKeys> wanted;
      for (EmbeddingTable* table : tables) {
        if (!MayOverflow(*table, requests.num_keys)) continue;
        wanted.push_back({table, KeysOf(tables, requests, table), /*is_access=*/true});
        if (options.joins_step) table->AppendStepKeys(&wanted.back().keys);
      }
      status = EvictFor(std::move(wanted), "the batches of all ranks need");
      if (!status.ok()) return status;
      for (EmbeddingTable* table : tables) {
        table->BeginLookup(options.joins_step);
        if (!options.joins_step || table->options().capacity == 0) continue;
        const std::vector<int64_t> keys = KeysOf(tables, requests, table);
        table->NoteStepKeys(keys.data(), static_cast<int64_t>(keys.size()));
      }
    }
    for (EmbeddingTable* table : tables) {
      if (table->rows().spilled() == nullptr) continue;
      const std::vector<int64_t> keys = KeysOf(tables, requests, table);
      status = table->rows().LoadRow(keys.data(), static_cast<int64_t>(keys.size()),
                                     /*reads=*/!options.create_missing,
                                     "the requests of all ranks need", options.parallel);
      if (!status.ok()) return status;
    }
    pulled->messages.clear();
    pulled->lengths.clear();
    pulled->row_bytes.assign(static_cast<size_t>(requests.ranks), 0);
    int64_t max_bytes = 0;
    std::optional<RowMessage> message;
    size_t parts = 0;
    ForEachPart(tables, requests, [&](const BufferPart& part) {
      if (parts++ % tables.size() == 0) message.emplace(options.format, &pulled->messages);
      PackPart(part, options, &pulled->messages);
      if (parts % tables.size() != 0) return;
      const auto rank = static_cast<size_t>(part.rank);
      pulled->row_bytes[rank] = message->row_bytes();
      max_bytes = std::max(max_bytes, message->row_bytes());
      // Do not store a length that exceeds the maximum, because the message is not sent.
      if (max_bytes > options.max_rank_bytes) return;
      pulled->lengths.push_back(static_cast<int32_t>(message->End(rank, lengths)));
    });
    if (max_bytes > options.max_rank_bytes) {
      return ResourceExhausted("the rows that a rank requests have " + std::to_string(max_bytes) +
                               " bytes; expected at most " +
                               std::to_string(options.max_rank_bytes) + ". Reduce the batch size");
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("pulling rows", tables);
  }
  return OkStatus();
}

}  // namespace slipstream
