#include "cc_ops/core/exchange/push.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace {

// Puts collected rows into their owners' buffer. What it needs memory for is made first: rows that
// were collected are nowhere else.
class SendBufferWriter {
 public:
  // most: [tables], rows that may be collected.
  SendBufferWriter(const std::vector<EmbeddingTable*>& tables, const std::vector<int64_t>& most,
                   int ranks, SendBuffer* buffer)
      : tables_(tables), ranks_(ranks), buffer_(buffer) {
    size_t rows = 0, values = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      rows += static_cast<size_t>(most[t]);
      values += static_cast<size_t>(most[t] * tables[t]->dim());
    }
    buffer->ranks = ranks;
    buffer->sizes.assign(static_cast<size_t>(ranks) * tables.size(), 0);
    buffer->keys.clear();
    buffer->values.clear();
    buffer->keys.reserve(rows);
    buffer->values.reserve(values);
    ends_.resize(buffer->sizes.size());
    rows_.reserve(rows);
  }

  // How much may be collected.
  int64_t most_rows() const { return static_cast<int64_t>(buffer_->keys.capacity()); }
  int64_t most_values() const { return static_cast<int64_t>(buffer_->values.capacity()); }

  // parts: [tasks][tables], in order.
  void Pack(const std::vector<std::vector<CollectedRows>>& parts) {
    const size_t num_tables = tables_.size();
    std::vector<int64_t>& sizes = buffer_->sizes;
    for (const auto& part : parts) {
      for (size_t t = 0; t < num_tables; ++t) {
        for (const int64_t key : part[t].keys) ++sizes[OwnerOfKey(key) * num_tables + t];
      }
    }
    int64_t total = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      ends_[i] = total;
      total += sizes[i];
    }
    rows_.resize(static_cast<size_t>(total));
    for (const auto& part : parts) {
      for (size_t t = 0; t < num_tables; ++t) {
        const float* row = part[t].rows.data();
        for (const int64_t key : part[t].keys) {
          rows_[ends_[OwnerOfKey(key) * num_tables + t]++] = {key, row};
          row += tables_[t]->dim();
        }
      }
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      std::sort(rows_.begin() + ends_[i] - sizes[i], rows_.begin() + ends_[i]);
      for (int64_t r = ends_[i] - sizes[i]; r < ends_[i]; ++r) {
        const float* row = rows_[r].second;
        buffer_->keys.push_back(rows_[r].first);
        buffer_->values.insert(buffer_->values.end(), row, row + tables_[i % num_tables]->dim());
      }
    }
  }

 private:
  size_t OwnerOfKey(int64_t key) const {
    return ranks_ == 1 ? size_t{0} : static_cast<size_t>(OwnerOf(key, ranks_));
  }

  const std::vector<EmbeddingTable*>& tables_;
  const int ranks_;
  SendBuffer* buffer_;
  std::vector<int64_t> ends_;                           // [ranks * tables], in `rows_`
  std::vector<std::pair<int64_t, const float*>> rows_;  // by part
};

void Reserve(int64_t rows, int64_t dim, CollectedRows* collected) {
  collected->keys.reserve(static_cast<size_t>(rows));
  collected->rows.reserve(static_cast<size_t>(rows * dim));
}

// One table's rows in all buffer, in their order.
struct TableRows {
  std::vector<int64_t> keys;
  std::vector<const float*> rows;
};

// Of buffer that were checked.
std::vector<TableRows> Unpack(const std::vector<EmbeddingTable*>& tables,
                              const SendBufferView& buffer) {
  std::vector<TableRows> unpacked(tables.size());
  const int64_t* key = buffer.keys;
  const float* value = buffer.values;
  for (int rank = 0; rank < buffer.ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t size = buffer.sizes[static_cast<size_t>(rank) * tables.size() + t];
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
    arrivals.push_back({ShardOf(keys[i]), keys[i], static_cast<uint32_t>(i)});
  }
  std::sort(arrivals.begin(), arrivals.end());
  return arrivals;
}

// The arrivals of the shards [first, last).
CellRange ArrivalsOf(const std::vector<Arrival>& arrivals, CellRange shards) {
  const auto is_before = [](const Arrival& a, int64_t shard) { return a.shard < shard; };
  const auto begin = std::lower_bound(arrivals.begin(), arrivals.end(), shards.begin, is_before);
  const auto end = std::lower_bound(begin, arrivals.end(), shards.end, is_before);
  return {begin - arrivals.begin(), end - arrivals.begin()};
}

// fn(begin, end) for the arrivals of each key in a range.
template <class Fn>
void ForEachKey(const std::vector<Arrival>& arrivals, CellRange range, const Fn& fn) {
  for (int64_t begin = range.begin; begin < range.end;) {
    int64_t end = begin + 1;
    while (end < range.end && arrivals[end].key == arrivals[begin].key) ++end;
    fn(begin, end);
    begin = end;
  }
}

// Applies sums to the rows of one table, in two passes: only the first needs memory.
class RowUpdater {
 public:
  RowUpdater(EmbeddingTable* table, float rate, float scale, bool create_missing)
      : table_(table),
        rule_(table->options().rule),
        dim_(table->dim()),
        rate_(rate),
        scale_(scale),
        create_missing_(create_missing),
        sum_(static_cast<size_t>(dim_)),
        before_(static_cast<size_t>(dim_)) {}

  // found: [arrivals]; the place of a key's first arrival gets its row.
  void Find(const std::vector<Arrival>& arrivals, CellRange range,
            std::vector<FoundRow>* found) const {
    ForEachKey(arrivals, range, [&](int64_t begin, int64_t) {
      const int64_t key = arrivals[begin].key;
      FoundRow& place = (*found)[begin];
      place.row = create_missing_ ? table_->rows().FindOrInsert(key, 0.f, &place.slot)
                                  : table_->rows().Find(key, &place.slot);
    });
  }

  // Returns how many keys had no row.
  int64_t Update(const std::vector<Arrival>& arrivals, CellRange range,
                 const std::vector<FoundRow>& found, const TableRows& rows) {
    int64_t dropped = 0;
    ForEachKey(arrivals, range, [&](int64_t begin, int64_t end) {
      if (found[begin].row == nullptr) {
        ++dropped;
        return;
      }
      std::copy_n(rows.rows[arrivals[begin].place], dim_, sum_.data());
      for (int64_t a = begin + 1; a < end; ++a) {
        const float* part = rows.rows[arrivals[a].place];
        for (int64_t j = 0; j < dim_; ++j) sum_[j] += part[j];
      }
      if (scale_ != 1.f) {
        for (float& value : sum_) value *= scale_;
      }
      UpdateRow(rule_, rate_, dim_, sum_.data(), found[begin],
                table_->flags().shard(arrivals[begin].shard), before_.data());
    });
    return dropped;
  }

 private:
  EmbeddingTable* table_;
  const UpdateRule rule_;
  const int64_t dim_;
  const float rate_, scale_;
  const bool create_missing_;
  std::vector<float> sum_, before_;
};

}  // namespace

Status CheckSendBuffer(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const std::vector<int64_t>& row_floats) {
  int64_t keys = 0, values = 0;
  for (int rank = 0; rank < buffer.ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t size = buffer.sizes[static_cast<size_t>(rank) * tables.size() + t];
      const int64_t floats = row_floats[t];
      const int64_t keys_left = buffer.num_keys - keys, values_left = buffer.num_values - values;
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
  if (keys != buffer.num_keys || values != buffer.num_values) {
    return InvalidArgument("sizes name " + std::to_string(keys) + " keys and " +
                           std::to_string(values) + " values; there are " +
                           std::to_string(buffer.num_keys) + " and " +
                           std::to_string(buffer.num_values));
  }
  return OkStatus();
}

Status CollectGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                        const CollectOptions& options, const Parallel& parallel,
                        SendBuffer* buffer) {
  Status status = CheckFinite(plan, gradients, options.learning_rate, parallel);
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(plan.tables);
  const size_t num_tables = plan.tables.size();
  try {
    std::vector<float> rates;
    std::vector<bool> is_stale;
    for (size_t t = 0; t < num_tables; ++t) {
      const EmbeddingTable* table = plan.tables[t];
      rates.push_back(
          table->options().rule.EffectiveRate(options.learning_rate, table->updates().step() + 1));
      is_stale.push_back(table->rows().generation() != plan.generations[t]);
    }
    const std::vector<int64_t> bounds = BalancedBuckets(plan.unique_begin, parallel.threads);
    std::vector<std::vector<CollectedRows>> parts(parallel.threads,
                                                  std::vector<CollectedRows>(num_tables));
    std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch(plan.tables));
    std::vector<int64_t> most(num_tables, 0);
    for (int task = 0; task < parallel.threads; ++task) {
      std::vector<int64_t> of_task(num_tables, 0);
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
        of_task[static_cast<size_t>(b / kNumShards)] += MostCollected(plan, b);
      }
      for (size_t t = 0; t < num_tables; ++t) {
        Reserve(of_task[t], plan.tables[t]->dim(), &parts[task][t]);
        most[t] += of_task[t];
      }
    }
    SendBufferWriter packer(plan.tables, most, options.ranks, buffer);
    status = options.reserve(packer.most_rows(), packer.most_values());
    if (!status.ok()) return status;
    parallel.run(parallel.threads, [&](int task) {
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
        const size_t t = static_cast<size_t>(b / kNumShards);
        int64_t dropped = 0;
        const BucketUpdate update = {&plan,    &gradients,  plan.tables[t], b,
                                     rates[t], is_stale[t], &dropped};
        UpdateBucketByPolicy(update, &scratches[task], &parts[task][t]);
      }
    });
    if (options.advance_step) {
      for (EmbeddingTable* table : plan.tables) table->updates().NextStep();
    }
    packer.Pack(parts);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("collecting gradients", plan.tables);
  }
  return OkStatus();
}

Status CollectAllDeferred(const std::vector<EmbeddingTable*>& tables, const CollectOptions& options,
                          SendBuffer* buffer) try {
  const ExclusiveTableLocks locks(tables);
  std::vector<std::vector<CollectedRows>> parts(1, std::vector<CollectedRows>(tables.size()));
  std::vector<PolicyScratch> scratches;
  std::vector<int64_t> most;
  for (size_t t = 0; t < tables.size(); ++t) {
    most.push_back(tables[t]->updates().num_deferred());
    Reserve(most[t], tables[t]->dim(), &parts[0][t]);
    scratches.emplace_back(tables[t]->dim());
  }
  SendBufferWriter packer(tables, most, options.ranks, buffer);
  const Status status = options.reserve(packer.most_rows(), packer.most_values());
  if (!status.ok()) return status;
  for (size_t t = 0; t < tables.size(); ++t) {
    CollectDeferred(tables[t], &scratches[t], &parts[0][t]);
  }
  packer.Pack(parts);
  return OkStatus();
} catch (const std::bad_alloc&) {
  return OutOfMemory("collecting deferred gradients", tables);
}

Status ApplyRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                 float learning_rate, float scale, bool create_missing, const Parallel& parallel) {
  std::vector<int64_t> dims;
  for (const EmbeddingTable* table : tables) dims.push_back(table->dim());
  Status status = CheckSendBuffer(tables, buffer, dims);
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(tables);
  const size_t num_tables = tables.size();
  try {
    const std::vector<TableRows> rows = Unpack(tables, buffer);
    for (size_t t = 0; t < num_tables && status.ok(); ++t) {
      status = CheckRowsFinite(*tables[t], rows[t]);
    }
    if (!status.ok()) return status;
    std::vector<std::vector<Arrival>> arrivals;
    std::vector<std::vector<FoundRow>> found;
    std::vector<RowUpdater> updaters;  // [tasks * tables]
    for (const TableRows& of_table : rows) {
      arrivals.push_back(SortArrivals(of_table.keys));
      found.emplace_back(of_table.keys.size());
    }
    for (int task = 0; task < parallel.threads; ++task) {
      for (EmbeddingTable* table : tables) {
        const int64_t step = table->updates().step() + 1;
        const float rate = table->options().rule.EffectiveRate(learning_rate, step);
        updaters.emplace_back(table, rate, scale, create_missing);
      }
    }
    std::vector<std::atomic<int64_t>> dropped(num_tables);
    for (auto& count : dropped) count = 0;
    const auto range_of = [&](int task, size_t t) {
      return ArrivalsOf(arrivals[t], CellsOf(task, parallel.threads, kNumShards));
    };
    const std::function<void(int)> update_rows = [&](int task) {
      for (size_t t = 0; t < num_tables; ++t) {
        RowUpdater& updater = updaters[static_cast<size_t>(task) * num_tables + t];
        dropped[t] += updater.Update(arrivals[t], range_of(task, t), found[t], rows[t]);
      }
    };
    parallel.run(parallel.threads, [&](int task) {
      for (size_t t = 0; t < num_tables; ++t) {
        const RowUpdater& updater = updaters[static_cast<size_t>(task) * num_tables + t];
        updater.Find(arrivals[t], range_of(task, t), &found[t]);
      }
    });
    // From here on nothing needs memory: rows are updated all or none.
    for (EmbeddingTable* table : tables) {
      table->updates().NextStep();
      table->updates().set_last_learning_rate(learning_rate);
    }
    parallel.run(parallel.threads, update_rows);
    for (size_t t = 0; t < num_tables; ++t) tables[t]->updates().AddDropped(dropped[t]);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("applying the ranks' gradients", tables);
  }
  return OkStatus();
}

}  // namespace slipstream
