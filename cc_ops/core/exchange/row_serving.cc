#include "cc_ops/core/exchange/row_serving.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/eviction.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"

namespace slipstream {
namespace {

constexpr int64_t kPrefetchAhead = 16;

// The tables of a rank's parcels: twice where copies are kept.
std::vector<EmbeddingTable*> TablesOfParcels(const std::vector<EmbeddingTable*>& tables,
                                             bool keeps) {
  std::vector<EmbeddingTable*> all = tables;
  if (keeps) all.insert(all.end(), tables.begin(), tables.end());
  return all;
}

// Of one table and rank.
struct Parcel {
  EmbeddingTable* table;
  int rank;
  bool is_of_copies;    // the rank keeps copies of these rows
  const int64_t* keys;  // [rows]
  int64_t rows;
};

// Calls fn for every parcel; they were checked.
template <class Fn>
void ForEachParcel(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                   bool keeps, Fn fn) {
  const int64_t *keys = parcels.keys, *rows = parcels.sizes;
  for (int rank = 0; rank < parcels.ranks; ++rank) {
    for (const bool is_of_copies : {false, true}) {
      if (is_of_copies && !keeps) continue;
      for (EmbeddingTable* table : tables) {
        fn(Parcel{table, rank, is_of_copies, keys, *rows});
        keys += *rows++;
      }
    }
  }
}

void PrefetchAhead(const Parcel& parcel, int64_t i) {
  if (i + kPrefetchAhead < parcel.rows) {
    parcel.table->rows().Prefetch(HashKey(parcel.keys[i + kPrefetchAhead]));
  }
}

// Lets rows go that the keys' rows need the place of.
Status MakeRoomForParcels(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                          bool keeps, int passed_over) {
  std::vector<WantedKeys> wanted;
  for (EmbeddingTable* bounded : tables) {
    if (!MayOverflow(*bounded, parcels.num_keys)) continue;
    std::vector<int64_t> keys;
    ForEachParcel(tables, parcels, keeps, [&](const Parcel& parcel) {
      if (parcel.table != bounded || parcel.rank == passed_over) return;
      keys.insert(keys.end(), parcel.keys, parcel.keys + parcel.rows);
    });
    wanted.push_back({bounded, std::move(keys)});
  }
  return EvictFor(std::move(wanted), "the ranks' batches need");
}

// A rank that will have a replica of a row once what is packed has been sent.
struct NewHolder {
  PublishedRows* published;
  int32_t place;
  int rank;
};

// Packs the row of a key of which ranks have refreshed replicas.
void PackPublished(const Parcel& parcel, int32_t place, int64_t key, const float* row,
                   RowPacker* packer, std::vector<NewHolder>* new_holders) {
  PublishedRows& published = parcel.table->published();
  const float* current = published.Current(place, row, parcel.table->dim());
  if (parcel.is_of_copies && published.HasCopy(place, parcel.rank)) {
    packer->AddUnchanged();
    return;
  }
  packer->Add(key, current, true, parcel.is_of_copies);
  new_holders->push_back({&published, place, parcel.rank});
}

// InvalidArgument if a row is not given whose copy is not kept here.
Status CheckUnchanged(const std::vector<EmbeddingTable*>& copies, const RowParcelsView& keys,
                      RowFormat format, const uint8_t* bytes) {
  Status status = OkStatus();
  ForEachParcel(copies, keys, format.keeps, [&](const Parcel& parcel) {
    RowUnpacker unpacker(*parcel.table, format, parcel.rows, bytes);
    for (int64_t i = 0; i < parcel.rows && parcel.is_of_copies; ++i, unpacker.Pass()) {
      if (unpacker.IsNextGiven()) continue;
      const uint64_t hash = HashKey(parcel.keys[i]);
      uint32_t slot = 0;
      const bool is_kept =
          parcel.table->rows().Find(parcel.keys[i], hash, &slot) != nullptr &&
          (parcel.table->flags().shard(ShardOf(hash))->Of(slot) & kRefreshedReplica) != 0;
      if (is_kept || !status.ok()) continue;
      status = InvalidArgument("the row of key " + std::to_string(parcel.keys[i]) + " of table '" +
                               parcel.table->options().name + "' did not come from rank " +
                               std::to_string(parcel.rank) + ", and no copy of it is kept here");
    }
    bytes = RowUnpacker(*parcel.table, format, parcel.rows, bytes).End();
  });
  return status;
}

}  // namespace

Status RouteKeys(const std::vector<EmbeddingTable*>& copies,
                 const std::vector<FeatureView>& features, const RouteOptions& options,
                 const Parallel& parallel, RowParcels* requests) {
  const int64_t batch = features.empty() ? 0 : features[0].batch;
  const SharedTableLocks locks(copies);
  const size_t num_tables = copies.size(), of_rank = num_tables * (options.keeps ? 2 : 1);
  const size_t num_parcels = static_cast<size_t>(options.ranks) * of_rank;
  try {
    const Positions positions(features);
    SortedKeys sorted;
    SortByBucket(features, batch, static_cast<int>(num_tables), positions, false, parallel,
                 &sorted);
    // [tasks][parcels]
    using Keys = std::vector<std::vector<int64_t>>;
    std::vector<Keys> parts(parallel.threads, Keys(num_parcels));
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
          const bool is_here = copies[t]->rows().Find(*key, hash, &slot) != nullptr;
          const uint8_t mark = is_here ? copies[t]->flags().shard(ShardOf(hash))->Of(slot) : 0;
          if (options.reads_frozen && (mark & kReadOnlyReplica) != 0) continue;
          const size_t owner = static_cast<size_t>(OwnerOf(*key, options.ranks));
          const bool is_kept = options.keeps && (mark & kRefreshedReplica) != 0;
          parts[task][owner * of_rank + t + (is_kept ? num_tables : 0)].push_back(*key);
        }
      }
    });
    requests->ranks = options.ranks;
    requests->sizes.clear();
    requests->keys.clear();
    requests->values.clear();
    for (size_t parcel = 0; parcel < num_parcels; ++parcel) {
      const size_t before = requests->keys.size();
      for (const Keys& part : parts) {
        requests->keys.insert(requests->keys.end(), part[parcel].begin(), part[parcel].end());
      }
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
  const bool keeps = options.format.keeps;
  const std::vector<EmbeddingTable*> of_parcels = TablesOfParcels(tables, keeps);
  Status status = CheckParcels(of_parcels, requests, std::vector<int64_t>(of_parcels.size(), 0));
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(tables);
  for (const EmbeddingTable* table : tables) {
    const PublishedRows& published = table->published();
    if (!keeps || published.size() == 0 || published.ranks() == requests.ranks) continue;
    return InvalidArgument("copies of rows of table '" + table->options().name + "' are kept by " +
                           std::to_string(published.ranks()) + " ranks; sizes are those of " +
                           std::to_string(requests.ranks));
  }
  try {
    if (options.makes_rows) {
      status = MakeRoomForParcels(tables, requests, keeps, -1);
      if (!status.ok()) return status;
      for (EmbeddingTable* table : tables) table->rows().NextLookupStep();
    }
    std::vector<NewHolder> new_holders;
    bytes->clear();
    rank_bytes->assign(static_cast<size_t>(requests.ranks), 0);
    ForEachParcel(tables, requests, keeps, [&](const Parcel& parcel) {
      EmbeddingTable* table = parcel.table;
      const size_t before = bytes->size();
      const bool is_others = keeps && parcel.rank != options.own_rank;
      RowPacker packer(*table, options.format, parcel.rows, bytes);
      for (int64_t i = 0; i < parcel.rows; ++i) {
        PrefetchAhead(parcel, i);
        uint32_t slot = 0;
        const int64_t key = parcel.keys[i];
        const uint64_t hash = HashKey(key);
        const float* row = options.makes_rows ? table->rows().FindOrInsert(key, hash, 1.f, &slot)
                                              : table->rows().Find(key, hash);
        const int32_t place =
            is_others && row != nullptr ? table->published().Find(key) : PublishedRows::kNowhere;
        if (place == PublishedRows::kNowhere) {
          packer.Add(key, row, false, parcel.is_of_copies);
        } else {
          PackPublished(parcel, place, key, row, &packer, &new_holders);
        }
      }
      (*rank_bytes)[static_cast<size_t>(parcel.rank)] +=
          static_cast<int64_t>(bytes->size() - before);
    });
    const int64_t most = *std::max_element(rank_bytes->begin(), rank_bytes->end());
    if (most > options.most_rank_bytes) {
      return ResourceExhausted("the rows that a rank requests take " + std::to_string(most) +
                               " bytes; at most " + std::to_string(options.most_rank_bytes) +
                               " can be sent: make the batches smaller");
    }
    // From here on nothing fails: a rank that is sent nothing must not count as having a replica.
    for (const NewHolder& holder : new_holders) {
      holder.published->SetHasCopy(holder.place, holder.rank);
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("serving rows", tables);
  }
  return OkStatus();
}

Status StoreCopies(const std::vector<EmbeddingTable*>& copies, const RowParcelsView& keys,
                   const uint8_t* bytes, int64_t num_bytes, const CopyOptions& options) {
  const bool keeps = options.format.keeps;
  const std::vector<EmbeddingTable*> of_parcels = TablesOfParcels(copies, keeps);
  Status status = CheckServedRows(of_parcels, keys, options.format, bytes, num_bytes);
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(copies);
  try {
    if (keeps) {
      status = CheckUnchanged(copies, keys, options.format, bytes);
      if (!status.ok()) return status;
    }
    if (options.makes_room) {
      status = MakeRoomForParcels(copies, keys, keeps, options.passed_over);
      if (!status.ok()) return status;
    }
    ForEachParcel(copies, keys, keeps, [&](const Parcel& parcel) {
      EmbeddingTable* table = parcel.table;
      RowUnpacker unpacker(*table, options.format, parcel.rows, bytes);
      for (int64_t i = 0; i < parcel.rows && parcel.rank != options.passed_over; ++i) {
        PrefetchAhead(parcel, i);
        const int64_t key = parcel.keys[i];
        const uint64_t hash = HashKey(key);
        uint32_t slot = 0;
        if (parcel.is_of_copies && !unpacker.IsNextGiven()) {
          unpacker.Pass();
          continue;
        }
        float* row = table->rows().FindOrInsert(key, hash, 0.f, &slot);
        if (options.frozen) table->flags().Add(hash, slot, kReadOnlyReplica, table->rows());
        // Told to be kept only if it is there: what failed in between is asked for again.
        table->flags().Remove(hash, slot, kRefreshedReplica);
        const bool is_kept = unpacker.IsNextKept();
        unpacker.Next(key, row);
        if (is_kept) table->flags().Add(hash, slot, kRefreshedReplica, table->rows());
      }
      bytes = unpacker.End();
    });
  } catch (const std::bad_alloc&) {
    return OutOfMemory("copying rows", copies);
  }
  return OkStatus();
}

}  // namespace slipstream
