#include "cc_ops/core/row_serving.h"

#include <algorithm>
#include <new>
#include <utility>

#include "cc_ops/core/key_sort.h"
#include "cc_ops/core/table_locks.h"
#include "cc_ops/core/table_room.h"

namespace slipstream {
namespace {

constexpr int64_t kPrefetchAhead = 16;

std::vector<int64_t> RowFloats(const std::vector<EmbeddingTable*>& tables, bool with_summary) {
  std::vector<int64_t> floats;
  for (const EmbeddingTable* table : tables) floats.push_back(ServedFloats(*table, with_summary));
  return floats;
}

// Calls fn(table, key, row's place in values) for every row of parcels that were checked.
template <class Fn>
void ForEachRow(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                const std::vector<int64_t>& row_floats, int passed_over, Fn fn) {
  int64_t place = 0, value = 0;
  for (int rank = 0; rank < parcels.ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t end = place + parcels.sizes[static_cast<size_t>(rank) * tables.size() + t];
      for (; place < end; ++place, value += row_floats[t]) {
        if (rank == passed_over) continue;
        if (place + kPrefetchAhead < end) {
          tables[t]->Prefetch(HashKey(parcels.keys[place + kPrefetchAhead]));
        }
        fn(tables[t], parcels.keys[place], value);
      }
    }
  }
}

// Lets rows go that the keys' rows need the place of.
Status MakeRoomForParcels(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                          int passed_over) {
  std::vector<WantedKeys> wanted;
  const std::vector<int64_t> no_values(tables.size(), 0);
  for (EmbeddingTable* bounded : tables) {
    if (!MayOverflow(*bounded, parcels.num_keys)) continue;
    std::vector<int64_t> keys;
    ForEachRow(tables, parcels, no_values, passed_over,
               [&](const EmbeddingTable* table, int64_t key, int64_t) {
                 if (table == bounded) keys.push_back(key);
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
  Status status = CheckParcels(tables, requests, std::vector<int64_t>(tables.size(), 0));
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(tables);
  try {
    if (makes_rows) {
      status = MakeRoomForParcels(tables, requests, -1);
      if (!status.ok()) return status;
      for (EmbeddingTable* table : tables) table->NextLookupStep();
    }
    values->clear();
    const auto serve = [&](EmbeddingTable* table, int64_t key, int64_t at) {
      const int64_t dim = table->dim(), floats = ServedFloats(*table, with_summary);
      values->resize(static_cast<size_t>(at + floats));
      float* out = values->data() + at;
      uint32_t slot = 0;
      const uint64_t hash = HashKey(key);
      const float* row =
          makes_rows ? table->FindOrInsert(key, hash, 1.f, &slot) : table->Find(key, hash);
      std::vector<float> initial;
      if (row == nullptr) {
        initial.resize(static_cast<size_t>(dim + table->slots_per_row()));
        table->options().initializer.Fill(key, dim, initial.data());
        table->options().rule.InitSlots(dim, initial.data() + dim);
        row = initial.data();
      }
      std::copy_n(row, dim, out);
      if (floats > dim) out[dim] = table->options().rule.SlotSummary(dim, row);
    };
    ForEachRow(tables, requests, RowFloats(tables, with_summary), -1, serve);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory while serving rows");
  }
  return OkStatus();
}

Status StoreCopies(const std::vector<EmbeddingTable*>& copies, const RowParcelsView& rows,
                   const CopyOptions& options) {
  const std::vector<int64_t> row_floats = RowFloats(copies, options.with_summary);
  Status status = CheckParcels(copies, rows, row_floats);
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(copies);
  try {
    if (options.makes_room) {
      status = MakeRoomForParcels(copies, rows, options.passed_over);
      if (!status.ok()) return status;
    }
    const auto store = [&](EmbeddingTable* table, int64_t key, int64_t at) {
      const int64_t dim = table->dim();
      const uint64_t hash = HashKey(key);
      uint32_t slot = 0;
      float* row = table->FindOrInsert(key, hash, 0.f, &slot);
      std::copy_n(rows.values + at, dim, row);
      const bool has_summary = ServedFloats(*table, options.with_summary) > dim;
      table->options().rule.FillSlots(dim, has_summary ? rows.values[at + dim] : 0.f, row);
      if (options.frozen) table->AddMark(hash, slot, kFrozen);
    };
    ForEachRow(copies, rows, row_floats, options.passed_over, store);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory while copying rows");
  }
  return OkStatus();
}

}  // namespace slipstream
