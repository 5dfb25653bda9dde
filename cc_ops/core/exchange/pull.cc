#include "cc_ops/core/exchange/pull.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/eviction.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"
#include "cc_ops/core/update/update_loop.h"

namespace slipstream {
namespace {

// Before its row is used, a key's place in the index is fetched, then the row.
constexpr int64_t kKeysAhead = 16, kRowsAhead = 8;

// Of one table and rank.
struct BufferPart {
  EmbeddingTable* table;
  int rank;
  const int64_t* keys;  // [rows]
  int64_t rows;
};

// Calls fn for every part; they were checked.
template <class Fn>
void ForEachPart(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer, Fn fn) {
  const int64_t *keys = buffer.keys, *rows = buffer.sizes;
  for (int rank = 0; rank < buffer.ranks; ++rank) {
    for (EmbeddingTable* table : tables) {
      fn(BufferPart{table, rank, keys, *rows});
      keys += *rows++;
    }
  }
}

// Calls use(i, row) for each key of a part with what find(key) gave some keys before: its row, or
// null, which has come from memory by then.
template <class Find, class Use>
void FindAhead(const BufferPart& part, Find find, Use use) {
  RowStore& rows = part.table->rows();
  const int64_t floats = part.table->dim() + part.table->slots_per_row();
  FoundRow found[kRowsAhead];
  for (int64_t i = 0; i < part.rows + kRowsAhead; ++i) {
    FoundRow& next = found[i % kRowsAhead];
    if (i >= kRowsAhead) use(i - kRowsAhead, next);
    if (i >= part.rows) continue;
    if (i + kKeysAhead < part.rows) rows.Prefetch(part.keys[i + kKeysAhead]);
    next.row = find(part.keys[i], &next.index);
    if (next.row != nullptr) PrefetchRow(next.row, floats);
  }
}

// Evicts rows for the keys' rows.
Status EvictForParts(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                     int ignored_rank) {
  std::vector<WantedKeys> wanted;
  for (EmbeddingTable* bounded : tables) {
    if (!MayOverflow(*bounded, buffer.num_keys)) continue;
    std::vector<int64_t> keys;
    ForEachPart(tables, buffer, [&](const BufferPart& part) {
      if (part.table != bounded || part.rank == ignored_rank) return;
      keys.insert(keys.end(), part.keys, part.keys + part.rows);
    });
    wanted.push_back({bounded, std::move(keys)});
  }
  return EvictFor(std::move(wanted), "the ranks' batches need");
}

// Calls fn(part, &unpacker) of the part's rows for every part; they were checked. what it leaves is
// skipped.
template <class Fn>
void ForEachPulledPart(const std::vector<EmbeddingTable*>& tables, const SendBufferView& keys,
                       const std::vector<RowsView>& rows, Fn fn) {
  int rank = -1;
  const uint8_t* bytes = nullptr;
  ForEachPart(tables, keys, [&](const BufferPart& part) {
    const RowsView& of_rank = rows[static_cast<size_t>(part.rank)];
    if (part.rank != rank) bytes = of_rank.bytes;
    rank = part.rank;
    RowUnpacker unpacker(*part.table, of_rank.format, part.rows, bytes);
    fn(part, &unpacker);
    bytes = unpacker.End();
  });
}

void PackPart(const BufferPart& part, const PullOptions& options, std::vector<uint8_t>* bytes) {
  EmbeddingTable* table = part.table;
  RowPacker packer(*table, options.format, part.rows, bytes);
  const auto find = [&](int64_t key, uint32_t* index) {
    return options.create_missing ? table->rows().FindOrInsert(key, 1.f, index)
                                  : table->rows().Find(key, index);
  };
  FindAhead(part, find,
            [&](int64_t i, const FoundRow& found) { packer.Add(part.keys[i], found.row); });
}

}  // namespace

Status RouteKeys(const std::vector<EmbeddingTable*>& replicas,
                 const std::vector<FeatureView>& features, const RouteOptions& options,
                 const Parallel& parallel, SendBuffer* requests) {
  const SharedTableLocks locks(replicas);
  const size_t num_tables = replicas.size();
  const size_t num_parts = static_cast<size_t>(options.ranks) * num_tables;
  try {
    const Positions positions(features);
    SortedKeys sorted;
    SortByBucket(features, static_cast<int>(num_tables), positions, false, parallel, &sorted);
    // [tasks][buffer]
    using Keys = std::vector<std::vector<int64_t>>;
    std::vector<Keys> parts(parallel.threads, Keys(num_parts));
    const std::vector<int64_t> bounds = BalancedBuckets(sorted.begin, parallel.threads);
    parallel.run(parallel.threads, [&](int task) {
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
        const size_t t = static_cast<size_t>(b / kNumShards);
        const ShardFlags& flags_of_shard = *replicas[t]->flags().shard(b % kNumShards);
        const auto begin = sorted.key.begin() + sorted.begin[b];
        auto end = sorted.key.begin() + sorted.begin[b + 1];
        std::sort(begin, end);
        end = std::unique(begin, end);
        for (auto key = begin; key != end; ++key) {
          uint32_t index = 0;
          const bool is_here =
              flags_of_shard.any() && replicas[t]->rows().Find(*key, &index) != nullptr;
          const uint8_t flags = is_here ? flags_of_shard.Of(index) : 0;
          if (options.skip_read_only && (flags & kReadOnlyReplica) != 0) continue;
          const size_t owner = static_cast<size_t>(OwnerOf(*key, options.ranks));
          parts[task][owner * num_tables + t].push_back(*key);
        }
      }
    });
    requests->ranks = options.ranks;
    requests->sizes.clear();
    requests->keys.clear();
    requests->values.clear();
    for (size_t p = 0; p < num_parts; ++p) {
      const size_t before = requests->keys.size();
      for (const Keys& of_task : parts) {
        requests->keys.insert(requests->keys.end(), of_task[p].begin(), of_task[p].end());
      }
      requests->sizes.push_back(static_cast<int64_t>(requests->keys.size() - before));
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("sorting the keys of a batch", replicas);
  }
  return OkStatus();
}

Status PullRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& requests,
                const PullOptions& options, SteadyLengths* lengths, PulledRows* pulled) {
  Status status = CheckSendBuffer(tables, requests, std::vector<int64_t>(tables.size(), 0));
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(tables);
  try {
    if (options.create_missing) {
      status = EvictForParts(tables, requests, -1);
      if (!status.ok()) return status;
      for (EmbeddingTable* table : tables) table->rows().NextLookupStep();
    }
    pulled->messages.clear();
    pulled->lengths.clear();
    pulled->row_bytes.assign(static_cast<size_t>(requests.ranks), 0);
    int64_t most_bytes = 0;
    std::optional<RowMessage> message;
    size_t parts = 0;
    ForEachPart(tables, requests, [&](const BufferPart& part) {
      if (parts++ % tables.size() == 0) message.emplace(options.format, &pulled->messages);
      PackPart(part, options, &pulled->messages);
      if (parts % tables.size() != 0) return;
      const auto rank = static_cast<size_t>(part.rank);
      pulled->row_bytes[rank] = message->row_bytes();
      most_bytes = std::max(most_bytes, message->row_bytes());
      // A length that cannot be sent is not to be remembered.
      if (most_bytes > options.most_rank_bytes) return;
      pulled->lengths.push_back(static_cast<int32_t>(message->End(rank, lengths)));
    });
    if (most_bytes > options.most_rank_bytes) {
      return ResourceExhausted("the rows that a rank requests take " + std::to_string(most_bytes) +
                               " bytes; at most " + std::to_string(options.most_rank_bytes) +
                               " can be sent: make the batches smaller");
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("pulling rows", tables);
  }
  return OkStatus();
}

Status StoreReplicas(const std::vector<EmbeddingTable*>& replicas, const SendBufferView& keys,
                     const uint8_t* messages, int64_t num_bytes, const ReplicaOptions& options) {
  try {
    std::vector<RowsView> rows;
    Status status = SplitRowMessages(messages, num_bytes, keys.ranks, &rows);
    if (!status.ok()) return status;
    status = CheckPulledRows(replicas, keys, rows);
    if (!status.ok()) return status;
    const ExclusiveTableLocks locks(replicas);
    if (options.evict) {
      status = EvictForParts(replicas, keys, options.ignored_rank);
      if (!status.ok()) return status;
    }
    const auto store = [&](const BufferPart& part, RowUnpacker* unpacker) {
      if (part.rank == options.ignored_rank) return;
      EmbeddingTable* table = part.table;
      const auto find = [&](int64_t key, uint32_t* index) {
        return table->rows().FindOrInsert(key, 0.f, index);
      };
      FindAhead(part, find, [&](int64_t i, const FoundRow& found) {
        const int64_t key = part.keys[i];
        if (options.read_only) {
          table->flags().AddReadOnly(key, found.index, table->rows());
        }
        unpacker->Next(key, found.row);
      });
    };
    ForEachPulledPart(replicas, keys, rows, store);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("storing replicas", replicas);
  }
  return OkStatus();
}

}  // namespace slipstream
