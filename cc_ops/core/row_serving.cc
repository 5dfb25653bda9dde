#include "cc_ops/core/row_serving.h"

#include <algorithm>
#include <new>
#include <string>

#include "cc_ops/core/key_sort.h"
#include "cc_ops/core/table_locks.h"

namespace slipstream {
namespace {

constexpr int64_t kPrefetchAhead = 16;

// Calls fn(table, key, place in keys, row's place in values) for every row.
template <class Fn>
Status ForEachRow(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                  bool with_summary, int passed_over, Fn fn) {
  int64_t place = 0, value = 0;
  for (int rank = 0; rank < parcels.ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t size = parcels.sizes[static_cast<size_t>(rank) * tables.size() + t];
      const int64_t floats = ServedFloats(*tables[t], with_summary);
      if (size < 0 || size > parcels.num_keys - place) {
        return InvalidArgument("sizes[" + std::to_string(rank) + ", " + std::to_string(t) +
                               "] is " + std::to_string(size) + " rows of table '" +
                               tables[t]->options().name + "'; keys left are " +
                               std::to_string(parcels.num_keys - place));
      }
      for (int64_t i = 0; i < size; ++i, ++place, value += floats) {
        if (rank == passed_over) continue;
        if (i + kPrefetchAhead < size) {
          tables[t]->Prefetch(HashKey(parcels.keys[place + kPrefetchAhead]));
        }
        fn(tables[t], parcels.keys[place], value);
      }
    }
  }
  if (place != parcels.num_keys) {
    return InvalidArgument("sizes name " + std::to_string(place) + " keys; there are " +
                           std::to_string(parcels.num_keys));
  }
  return OkStatus();
}

// Lets rows go that the keys' rows need the place of. Fails without a change.
Status MakeRoomFor(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                   int passed_over) {
  for (EmbeddingTable* bounded : tables) {
    const int64_t capacity = bounded->options().capacity;
    if (capacity == 0 || bounded->size() + parcels.num_keys <= capacity) continue;
    std::vector<int64_t> wanted, present;
    const Status status = ForEachRow(tables, parcels, false, passed_over,
                                     [&](EmbeddingTable* table, int64_t key, int64_t) {
                                       if (table == bounded) wanted.push_back(key);
                                     });
    if (!status.ok()) return status;
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    const int64_t rows = static_cast<int64_t>(wanted.size());
    if (rows > capacity) {
      return ResourceExhausted("the ranks' batches need " + std::to_string(rows) +
                               " rows of table '" + bounded->options().name +
                               "' at once; its capacity is " + std::to_string(capacity) +
                               ": raise the capacity or make the batches smaller");
    }
    for (const int64_t key : wanted) {
      if (bounded->Find(key, HashKey(key)) != nullptr) present.push_back(key);
    }
    bounded->MakeRoom(rows - static_cast<int64_t>(present.size()), present);
  }
  return OkStatus();
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
    SortByBucket(features, batch, static_cast<int>(num_tables), positions, parallel, &sorted);
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
    return ResourceExhausted("out of memory while sorting the keys of a batch");
  }
  return OkStatus();
}

Status ServeRows(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& requests,
                 bool makes_rows, bool with_summary, std::vector<float>* values) {
  const ExclusiveTableLocks locks(tables);
  try {
    if (makes_rows) {
      const Status status = MakeRoomFor(tables, requests, -1);
      if (!status.ok()) return status;
      for (EmbeddingTable* table : tables) table->NextLookupStep();
    }
    values->clear();
    return ForEachRow(
        tables, requests, with_summary, -1, [&](EmbeddingTable* table, int64_t key, int64_t at) {
          const int64_t dim = table->dim(), floats = ServedFloats(*table, with_summary);
          values->resize(static_cast<size_t>(at + floats));
          float* out = values->data() + at;
          uint32_t slot = 0;
          const uint64_t hash = HashKey(key);
          const float* row =
              makes_rows ? table->FindOrInsert(key, hash, 1.f, &slot) : table->Find(key, hash);
          if (row != nullptr) {
            std::copy_n(row, dim, out);
            if (floats > dim) out[dim] = table->options().rule.SlotSummary(dim, row);
            return;
          }
          std::vector<float> initial(static_cast<size_t>(dim + table->slots_per_row()));
          table->options().initializer.Fill(key, dim, initial.data());
          table->options().rule.InitSlots(dim, initial.data() + dim);
          std::copy_n(initial.data(), dim, out);
          if (floats > dim) out[dim] = table->options().rule.SlotSummary(dim, initial.data());
        });
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory while serving rows");
  }
}

Status StoreCopies(const std::vector<EmbeddingTable*>& copies, const RowParcelsView& rows,
                   const CopyOptions& options) {
  const ExclusiveTableLocks locks(copies);
  int64_t wanted = 0;
  for (int rank = 0; rank < rows.ranks; ++rank) {
    for (size_t t = 0; t < copies.size(); ++t) {
      wanted += rows.sizes[static_cast<size_t>(rank) * copies.size() + t] *
                ServedFloats(*copies[t], options.with_summary);
    }
  }
  if (wanted != rows.num_values) {
    return InvalidArgument("sizes name " + std::to_string(wanted) + " values; there are " +
                           std::to_string(rows.num_values));
  }
  try {
    if (options.makes_room) {
      const Status status = MakeRoomFor(copies, rows, options.passed_over);
      if (!status.ok()) return status;
    }
    return ForEachRow(copies, rows, options.with_summary, options.passed_over,
                      [&](EmbeddingTable* table, int64_t key, int64_t at) {
                        const int64_t dim = table->dim();
                        const uint64_t hash = HashKey(key);
                        uint32_t slot = 0;
                        float* row = table->FindOrInsert(key, hash, 0.f, &slot);
                        std::copy_n(rows.values + at, dim, row);
                        const bool has_summary = ServedFloats(*table, options.with_summary) > dim;
                        table->options().rule.FillSlots(
                            dim, has_summary ? rows.values[at + dim] : 0.f, row);
                        if (options.frozen) table->AddMark(hash, slot, kFrozen);
                      });
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory while copying rows");
  }
}

}  // namespace slipstream
