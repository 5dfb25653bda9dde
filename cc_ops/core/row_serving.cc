#include "cc_ops/core/row_serving.h"

#include <algorithm>
#include <new>
#include <utility>

#include "cc_ops/core/key_sort.h"
#include "cc_ops/core/out_of_memory.h"
#include "cc_ops/core/table_locks.h"
#include "cc_ops/core/table_room.h"

namespace slipstream {
namespace {

constexpr int64_t kPrefetchAhead = 16;

// Calls fn(table, rank, place of the first key, rows) for every rank and table of parcels
// that were checked.
template <class Fn>
void ForEachParcel(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                   Fn fn) {
  int64_t place = 0;
  for (int rank = 0; rank < parcels.ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t rows = parcels.sizes[static_cast<size_t>(rank) * tables.size() + t];
      fn(tables[t], rank, place, rows);
      place += rows;
    }
  }
}

void PrefetchAhead(const EmbeddingTable& table, const int64_t* keys, int64_t i, int64_t rows) {
  if (i + kPrefetchAhead < rows) table.Prefetch(HashKey(keys[i + kPrefetchAhead]));
}

// Lets rows go that the keys' rows need the place of.
Status MakeRoomForParcels(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                          int passed_over) {
  std::vector<WantedKeys> wanted;
  for (EmbeddingTable* bounded : tables) {
    if (!MayOverflow(*bounded, parcels.num_keys)) continue;
    std::vector<int64_t> keys;
    ForEachParcel(tables, parcels,
                  [&](const EmbeddingTable* table, int rank, int64_t first, int64_t rows) {
                    if (table != bounded || rank == passed_over) return;
                    keys.insert(keys.end(), parcels.keys + first, parcels.keys + first + rows);
                  });
    wanted.push_back({bounded, std::move(keys)});
  }
  return MakeRoomFor(std::move(wanted), "the ranks' batches need");
}

}  // namespace

Status RouteKeys(const std::vector<EmbeddingTable*>& copies,
                 const std::vector<FeatureView>& features, int ranks, bool reads_frozen,
                 const Parallel& parallel, RowParcels* requests) {
  const int64_t batch = features.empty() ? 0 : features[0].batch;
  const SharedTableLocks locks(copies);
  const size_t num_tables = copies.size();
  try {
    const Positions positions(features);
    SortedKeys sorted;
    SortByBucket(features, batch, static_cast<int>(num_tables), positions, false, parallel,
                 &sorted);
    // [tasks][owner * tables + table]
    using Keys = std::vector<std::vector<int64_t>>;
    std::vector<Keys> parts(parallel.threads, Keys(static_cast<size_t>(ranks) * num_tables));
    const std::vector<int64_t> bounds = BalancedBuckets(sorted.begin, parallel.threads);
    parallel.run(parallel.threads, [&](int task) {
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
        const size_t t = static_cast<size_t>(b / kNumShards);
        const auto begin = sorted.key.begin() + sorted.begin[b];
        auto end = sorted.key.begin() + sorted.begin[b + 1];
        std::sort(begin, end);
        end = std::unique(begin, end);
        for (auto key = begin; key != end; ++key) {
          uint32_t slot = 0;
          const uint64_t hash = HashKey(*key);
          if (reads_frozen && copies[t]->Find(*key, hash, &slot) != nullptr &&
              (copies[t]->shard(ShardOf(hash))->MarkOf(slot) & kFrozen) != 0) {
            continue;
          }
          const size_t owner = static_cast<size_t>(OwnerOf(*key, ranks));
          parts[task][owner * num_tables + t].push_back(*key);
        }
      }
    });
    requests->ranks = ranks;
    requests->sizes.clear();
    requests->keys.clear();
    requests->values.clear();
    for (size_t parcel = 0; parcel < static_cast<size_t>(ranks) * num_tables; ++parcel) {
      const size_t before = requests->keys.size();
      for (const Keys& part : parts) {
        requests->keys.insert(requests->keys.end(), part[parcel].begin(), part[parcel].end());
      }
      // Neighbours are packed well.
      std::sort(requests->keys.begin() + static_cast<int64_t>(before), requests->keys.end());
      requests->sizes.push_back(static_cast<int64_t>(requests->keys.size() - before));
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("sorting the keys of a batch", copies);
  }
  return OkStatus();
}

Status ServeRows(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& requests,
                 const ServeOptions& options, std::vector<uint8_t>* bytes,
                 std::vector<int64_t>* rank_bytes) {
  Status status = CheckParcels(tables, requests, std::vector<int64_t>(tables.size(), 0));
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(tables);
  try {
    if (options.makes_rows) {
      status = MakeRoomForParcels(tables, requests, -1);
      if (!status.ok()) return status;
      for (EmbeddingTable* table : tables) table->NextLookupStep();
    }
    bytes->clear();
    rank_bytes->assign(static_cast<size_t>(requests.ranks), 0);
    ForEachParcel(
        tables, requests, [&](EmbeddingTable* table, int rank, int64_t first, int64_t rows) {
          const int64_t* keys = requests.keys + first;
          const size_t before = bytes->size();
          RowPacker packer(*table, options.format, options.gives_all, rows, bytes);
          for (int64_t i = 0; i < rows; ++i) {
            PrefetchAhead(*table, keys, i, rows);
            uint32_t slot = 0;
            const uint64_t hash = HashKey(keys[i]);
            packer.Add(keys[i], options.makes_rows ? table->FindOrInsert(keys[i], hash, 1.f, &slot)
                                                   : table->Find(keys[i], hash));
          }
          packer.End();
          (*rank_bytes)[static_cast<size_t>(rank)] += static_cast<int64_t>(bytes->size() - before);
        });
  } catch (const std::bad_alloc&) {
    return OutOfMemory("serving rows", tables);
  }
  return OkStatus();
}

Status StoreCopies(const std::vector<EmbeddingTable*>& copies, const RowParcelsView& keys,
                   const uint8_t* bytes, int64_t num_bytes, const CopyOptions& options) {
  std::vector<uint8_t> plain;
  Status status;
  if (options.format.packs) {
    try {
      status = UnpackServedRows(copies, keys, options.format, bytes, num_bytes, &plain);
    } catch (const std::bad_alloc&) {
      return ResourceExhausted("out of memory while unpacking rows");
    }
    bytes = plain.data();
  } else {
    status = CheckServedRows(copies, keys, options.format, bytes, num_bytes);
  }
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(copies);
  try {
    if (options.makes_room) {
      status = MakeRoomForParcels(copies, keys, options.passed_over);
      if (!status.ok()) return status;
    }
    ForEachParcel(copies, keys, [&](EmbeddingTable* table, int rank, int64_t first, int64_t rows) {
      const int64_t* of_parcel = keys.keys + first;
      RowUnpacker unpacker(*table, options.format, rows, bytes);
      for (int64_t i = 0; i < rows && rank != options.passed_over; ++i) {
        PrefetchAhead(*table, of_parcel, i, rows);
        const int64_t key = of_parcel[i];
        const uint64_t hash = HashKey(key);
        uint32_t slot = 0;
        unpacker.Next(key, table->FindOrInsert(key, hash, 0.f, &slot));
        if (options.frozen) table->AddMark(hash, slot, kFrozen);
      }
      bytes = unpacker.End();
    });
  } catch (const std::bad_alloc&) {
    return OutOfMemory("copying rows", copies);
  }
  return OkStatus();
}

}  // namespace slipstream
