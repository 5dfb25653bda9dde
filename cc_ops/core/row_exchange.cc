#include "cc_ops/core/row_exchange.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "cc_ops/core/key_sort.h"
#include "cc_ops/core/policy_update.h"
#include "cc_ops/core/row_update.h"
#include "cc_ops/core/table_locks.h"
#include "cc_ops/core/use_sums.h"

namespace slipstream {
namespace {

// parts: [tasks][tables], in order. Puts each key's row into its owner's parcel.
void Pack(const std::vector<EmbeddingTable*>& tables,
          const std::vector<std::vector<CollectedRows>>& parts, int ranks, RowParcels* parcels) {
  const size_t num_tables = tables.size();
  parcels->ranks = ranks;
  parcels->sizes.assign(static_cast<size_t>(ranks) * num_tables, 0);
  const auto owner_of = [ranks](int64_t key) {
    return ranks == 1 ? size_t{0} : static_cast<size_t>(OwnerOf(key, ranks));
  };
  for (const auto& part : parts) {
    for (size_t t = 0; t < num_tables; ++t) {
      for (const int64_t key : part[t].keys) ++parcels->sizes[owner_of(key) * num_tables + t];
    }
  }
  // [ranks * tables], each key with its row, by key: neighbours are packed well.
  std::vector<std::vector<std::pair<int64_t, const float*>>> rows(parcels->sizes.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i].reserve(static_cast<size_t>(parcels->sizes[i]));
  for (const auto& part : parts) {
    for (size_t t = 0; t < num_tables; ++t) {
      const float* row = part[t].rows.data();
      for (const int64_t key : part[t].keys) {
        rows[owner_of(key) * num_tables + t].emplace_back(key, row);
        row += tables[t]->dim();
      }
    }
  }
  parcels->keys.clear();
  parcels->values.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    std::sort(rows[i].begin(), rows[i].end());
    for (const auto& [key, row] : rows[i]) {
      parcels->keys.push_back(key);
      parcels->values.insert(parcels->values.end(), row, row + tables[i % num_tables]->dim());
    }
  }
}

// One table's rows in all parcels, in their order.
struct TableRows {
  std::vector<int64_t> keys;
  std::vector<const float*> rows;
};

// Of parcels that were checked.
std::vector<TableRows> Unpack(const std::vector<EmbeddingTable*>& tables,
                              const RowParcelsView& parcels) {
  std::vector<TableRows> unpacked(tables.size());
  const int64_t* key = parcels.keys;
  const float* value = parcels.values;
  for (int rank = 0; rank < parcels.ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t size = parcels.sizes[static_cast<size_t>(rank) * tables.size() + t];
      TableRows& rows = unpacked[t];
      rows.keys.insert(rows.keys.end(), key, key + size);
      key += size;
      for (int64_t i = 0; i < size; ++i, value += tables[t]->dim()) rows.rows.push_back(value);
    }
  }
  return unpacked;
}

Status CheckRowsFinite(const EmbeddingTable& table, const TableRows& rows) {
  for (size_t i = 0; i < rows.keys.size(); ++i) {
    if (RowIsFinite(rows.rows[i], table.dim())) continue;
    return InvalidArgument("a gradient of key " + std::to_string(rows.keys[i]) + " of table '" +
                           table.options().name +
                           "' that came from another rank is not finite; allowed: finite values. "
                           "No row was updated");
  }
  return OkStatus();
}

// A row to apply: `place` in the order of arrival.
struct Arrival {
  int shard;
  int64_t key;
  uint32_t place;
  bool operator<(const Arrival& other) const {
    if (shard != other.shard) return shard < other.shard;
    return key != other.key ? key < other.key : place < other.place;
  }
};

std::vector<Arrival> SortArrivals(const std::vector<int64_t>& keys) {
  std::vector<Arrival> arrivals;
  arrivals.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    arrivals.push_back({ShardOf(HashKey(keys[i])), keys[i], static_cast<uint32_t>(i)});
  }
  std::sort(arrivals.begin(), arrivals.end());
  return arrivals;
}

// Applies sums to the rows of one table.
class RowUpdater {
 public:
  RowUpdater(EmbeddingTable* table, float rate, float scale, bool makes_rows)
      : table_(table),
        rule_(table->options().rule),
        dim_(table->dim()),
        rate_(rate),
        scale_(scale),
        makes_rows_(makes_rows),
        sum_(static_cast<size_t>(dim_)),
        before_(static_cast<size_t>(dim_)) {}

  // The arrivals [begin, end) have the same key. False: it has no row.
  bool Update(const TableRows& rows, const Arrival* begin, const Arrival* end) {
    const uint64_t hash = HashKey(begin->key);
    uint32_t slot = 0;
    float* row = makes_rows_ ? table_->FindOrInsert(begin->key, hash, 0.f, &slot)
                             : table_->Find(begin->key, hash, &slot);
    if (row == nullptr) return false;
    std::copy_n(rows.rows[begin->place], dim_, sum_.data());
    for (const Arrival* a = begin + 1; a < end; ++a) {
      const float* part = rows.rows[a->place];
      for (int64_t j = 0; j < dim_; ++j) sum_[j] += part[j];
    }
    if (scale_ != 1.f) {
      for (float& value : sum_) value *= scale_;
    }
    UpdateRow(rule_, rate_, dim_, sum_.data(), slot, row, table_->shard(begin->shard),
              before_.data());
    return true;
  }

 private:
  EmbeddingTable* table_;
  const UpdateRule rule_;
  const int64_t dim_;
  const float rate_, scale_;
  const bool makes_rows_;
  std::vector<float> sum_, before_;
};

// Applies the arrivals of the shards [first, last).
int64_t ApplyShards(const std::vector<Arrival>& arrivals, const TableRows& rows, CellRange shards,
                    RowUpdater* updater) {
  const auto is_before = [](const Arrival& a, int64_t shard) { return a.shard < shard; };
  auto a = std::lower_bound(arrivals.begin(), arrivals.end(), shards.begin, is_before);
  const auto last = std::lower_bound(a, arrivals.end(), shards.end, is_before);
  int64_t dropped = 0;
  while (a != last) {
    auto end = a + 1;
    while (end != last && end->key == a->key) ++end;
    if (!updater->Update(rows, &*a, &*a + (end - a))) ++dropped;
    a = end;
  }
  return dropped;
}

}  // namespace

Status CheckParcels(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                    const std::vector<int64_t>& row_floats) {
  int64_t keys = 0, values = 0;
  for (int rank = 0; rank < parcels.ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t size = parcels.sizes[static_cast<size_t>(rank) * tables.size() + t];
      const int64_t floats = row_floats[t];
      const int64_t keys_left = parcels.num_keys - keys, values_left = parcels.num_values - values;
      if (size < 0 || size > keys_left || size * floats > values_left) {
        return InvalidArgument(
            "sizes[" + std::to_string(rank) + ", " + std::to_string(t) + "] is " +
            std::to_string(size) + " rows of table '" + tables[t]->options().name + "'; left are " +
            std::to_string(keys_left) + " keys and " + std::to_string(values_left) + " values of " +
            std::to_string(floats) + " a row");
      }
      keys += size;
      values += size * floats;
    }
  }
  if (keys != parcels.num_keys || values != parcels.num_values) {
    return InvalidArgument("sizes name " + std::to_string(keys) + " keys and " +
                           std::to_string(values) + " values; there are " +
                           std::to_string(parcels.num_keys) + " and " +
                           std::to_string(parcels.num_values));
  }
  return OkStatus();
}

Status CollectGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                        float learning_rate, int ranks, bool counts_update,
                        const Parallel& parallel, RowParcels* parcels) {
  const Status status = CheckFinite(plan, gradients, learning_rate, parallel);
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(plan.tables);
  const size_t num_tables = plan.tables.size();
  std::vector<float> rates;
  std::vector<bool> is_stale;
  for (size_t t = 0; t < num_tables; ++t) {
    const EmbeddingTable* table = plan.tables[t];
    rates.push_back(table->options().rule.EffectiveRate(learning_rate, table->update_step() + 1));
    is_stale.push_back(table->generation() != plan.generations[t]);
  }
  const std::vector<int64_t> bounds = BalancedBuckets(plan.unique_begin, parallel.threads);
  std::vector<std::vector<CollectedRows>> parts(parallel.threads,
                                                std::vector<CollectedRows>(num_tables));
  std::atomic<bool> is_out_of_memory{false};
  parallel.run(parallel.threads, [&](int task) {
    try {
      PolicyScratch scratch(plan.tables);
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
        const size_t t = static_cast<size_t>(b / kNumShards);
        int64_t dropped = 0;
        const BucketUpdate update = {&plan,    &gradients,  plan.tables[t], b,
                                     rates[t], is_stale[t], &dropped};
        CollectBucketByPolicy(update, &scratch, &parts[task][t]);
      }
    } catch (const std::bad_alloc&) {
      is_out_of_memory = true;
    }
  });
  if (is_out_of_memory) return ResourceExhausted("out of memory while collecting gradients");
  if (counts_update) {
    for (EmbeddingTable* table : plan.tables) table->NextUpdateStep();
  }
  Pack(plan.tables, parts, ranks, parcels);
  return OkStatus();
}

void CollectHeld(const std::vector<EmbeddingTable*>& tables, int ranks, RowParcels* parcels) {
  const ExclusiveTableLocks locks(tables);
  std::vector<std::vector<CollectedRows>> parts(1, std::vector<CollectedRows>(tables.size()));
  for (size_t t = 0; t < tables.size(); ++t) CollectDeferred(tables[t], &parts[0][t]);
  Pack(tables, parts, ranks, parcels);
}

Status ApplyRows(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                 float learning_rate, float scale, bool makes_rows, const Parallel& parallel) {
  std::vector<int64_t> dims;
  for (const EmbeddingTable* table : tables) dims.push_back(table->dim());
  Status status = CheckParcels(tables, parcels, dims);
  if (!status.ok()) return status;
  const std::vector<TableRows> rows = Unpack(tables, parcels);
  for (size_t t = 0; t < tables.size() && status.ok(); ++t) {
    status = CheckRowsFinite(*tables[t], rows[t]);
  }
  if (!status.ok()) return status;
  std::vector<std::vector<Arrival>> arrivals;
  for (const TableRows& of_table : rows) arrivals.push_back(SortArrivals(of_table.keys));
  const ExclusiveTableLocks locks(tables);
  std::vector<float> rates;
  for (EmbeddingTable* table : tables) {
    rates.push_back(table->options().rule.EffectiveRate(learning_rate, table->NextUpdateStep()));
    table->set_last_learning_rate(learning_rate);
  }
  std::vector<std::atomic<int64_t>> dropped(tables.size());
  for (auto& count : dropped) count = 0;
  std::atomic<bool> is_out_of_memory{false};
  parallel.run(parallel.threads, [&](int task) {
    try {
      for (size_t t = 0; t < tables.size(); ++t) {
        RowUpdater updater(tables[t], rates[t], scale, makes_rows);
        const CellRange shards = CellsOf(task, parallel.threads, kNumShards);
        dropped[t] += ApplyShards(arrivals[t], rows[t], shards, &updater);
      }
    } catch (const std::bad_alloc&) {
      is_out_of_memory = true;
    }
  });
  for (size_t t = 0; t < tables.size(); ++t) tables[t]->CountDroppedUpdates(dropped[t]);
  if (is_out_of_memory) return ResourceExhausted("out of memory while applying gradients");
  return OkStatus();
}

}  // namespace slipstream
