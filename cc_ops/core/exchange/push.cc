#include "cc_ops/core/exchange/push.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <new>
#include <string>
#include <utility>

#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/core/update/row_sweep.h"

namespace slipstream {
namespace {

// What a thread collects, and its memory for that.
struct CollectTask {
  explicit CollectTask(const std::vector<EmbeddingTable*>& tables)
      : scratch(tables), rows(tables.size()) {}

  PolicyScratch scratch;
  std::vector<CollectedRows> rows;  // [tables]
};

// Puts collected rows into their owners' buffer. What it needs memory for is made first: rows that
// were collected are nowhere else.
class SendBufferWriter {
 public:
  SendBufferWriter(const std::vector<EmbeddingTable*>& tables, int ranks, SendBuffer* buffer)
      : tables_(tables), ranks_(ranks), buffer_(buffer) {
    buffer->ranks = ranks;
    buffer->sizes.assign(static_cast<size_t>(ranks) * tables.size(), 0);
    buffer->keys.clear();
    buffer->values.clear();
    ends_.resize(buffer->sizes.size());
  }

  // A task will collect at most so many rows of a table.
  void Expect(size_t table, int64_t rows, CollectTask* task) {
    const int64_t values = rows * tables_[table]->dim();
    task->rows[table].keys.reserve(static_cast<size_t>(rows));
    task->rows[table].rows.reserve(static_cast<size_t>(values));
    num_rows_ += rows;
    num_values_ += values;
  }
  // Takes memory for all that is expected.
  Status Reserve(const CollectOptions& options) {
    buffer_->keys.reserve(static_cast<size_t>(num_rows_));
    buffer_->values.reserve(static_cast<size_t>(num_values_));
    rows_.reserve(static_cast<size_t>(num_rows_));
    return options.reserve(num_rows_, num_values_);
  }

  void Pack(const std::vector<CollectTask>& tasks) {
    const size_t num_tables = tables_.size();
    std::vector<int64_t>& sizes = buffer_->sizes;
    for (const CollectTask& task : tasks) {
      for (size_t t = 0; t < num_tables; ++t) {
        for (const int64_t key : task.rows[t].keys) ++sizes[OwnerOfKey(key) * num_tables + t];
      }
    }
    int64_t total = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      ends_[i] = total;
      total += sizes[i];
    }
    rows_.resize(static_cast<size_t>(total));
    for (const CollectTask& task : tasks) {
      for (size_t t = 0; t < num_tables; ++t) {
        const float* row = task.rows[t].rows.data();
        for (const int64_t key : task.rows[t].keys) {
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
  int64_t num_rows_ = 0, num_values_ = 0;
  std::vector<int64_t> ends_;                           // [ranks * tables], in `rows_`
  std::vector<std::pair<int64_t, const float*>> rows_;  // by part
};

// A gradient row that came from a rank. Rows of a table lie in memory in the order in which they
// came.
struct Arrival {
  int shard;
  int64_t key;
  const float* row;
  bool operator<(const Arrival& other) const {
    if (shard != other.shard) return shard < other.shard;
    return key != other.key ? key < other.key : row < other.row;
  }
};

// A key of the arrivals [begin, end), and its row, if it has one.
struct ArrivedKey {
  int64_t begin, end;
  FoundRow found;
};

// What becomes of one table's arrivals, in two passes: only the first needs memory.
class TableArrivals {
 public:
  explicit TableArrivals(EmbeddingTable* table) : table_(table) {}

  // Adds rows; InvalidArgument if one is not finite.
  Status Add(const int64_t* keys, const float* rows, int64_t n) {
    for (int64_t i = 0; i < n; ++i, rows += table_->dim()) {
      if (!RowIsFinite(rows, table_->dim())) {
        return InvalidArgument("a gradient of key " + std::to_string(keys[i]) + " of table '" +
                               table_->options().name +
                               "' that came from another rank is not finite; allowed: finite "
                               "values. No row was updated");
      }
      arrivals_.push_back({ShardOf(keys[i]), keys[i], rows});
    }
    return OkStatus();
  }

  // All rows have been added.
  void Sort(int tasks) {
    std::sort(arrivals_.begin(), arrivals_.end());
    keys_.resize(static_cast<size_t>(tasks));
  }

  // Finds, or makes, the rows of a task's shards.
  void Find(int task, bool create_missing) {
    const CellRange shards = CellsOf(task, static_cast<int>(keys_.size()), kNumShards);
    const auto is_before = [](const Arrival& a, int64_t shard) { return a.shard < shard; };
    auto begin = std::lower_bound(arrivals_.begin(), arrivals_.end(), shards.begin, is_before);
    while (begin != arrivals_.end() && begin->shard < shards.end) {
      const int64_t key = begin->key;
      const auto end = std::find_if(begin, arrivals_.end(),
                                    [&](const Arrival& other) { return other.key != key; });
      FoundRow found = {nullptr, 0};
      found.row = create_missing ? table_->rows().FindOrInsert(key, 0.f, &found.index)
                                 : table_->rows().Find(key, &found.index);
      keys_[task].push_back({begin - arrivals_.begin(), end - arrivals_.begin(), found});
      begin = end;
    }
  }

  // Of all rows from now on.
  void BeginUpdate(float learning_rate) { rates_ = table_->BeginUpdate(learning_rate); }

  // Updates the other rows of the task's shards, where that is to be.
  void Sweep(int task, SweepScratch* scratch) const {
    if (!IsSwept(*table_)) return;
    const std::vector<ArrivedKey>& keys = keys_[task];
    const CellRange shards = CellsOf(task, static_cast<int>(keys_.size()), kNumShards);
    auto key = keys.begin();
    for (int64_t s = shards.begin; s < shards.end; ++s) {
      ShardSweep sweep(table_, s, scratch);
      for (; key != keys.end() && arrivals_[key->begin].shard == s; ++key) {
        sweep.LeaveOut(arrivals_[key->begin].key);
      }
      sweep.UpdateOthers(rates_);
    }
  }

  // Applies the sum of each of the task's keys to its row.
  void Update(int task, float scale, PolicyScratch* scratch) {
    const std::vector<ArrivedKey>& keys = keys_[task];
    const UpdateRule rule = table_->options().rule;
    const int64_t dim = table_->dim(), num_keys = static_cast<int64_t>(keys.size());
    float* const sum = scratch->sum.data();
    int64_t dropped = 0;
    UpdateEach(
        {0, num_keys}, {num_keys, num_keys},
        [&](int64_t i, bool /*is_next*/) {
          PrefetchRow(keys[i].found.row, dim + table_->slots_per_row());
        },
        [&](int64_t i) {
          const ArrivedKey& key = keys[i];
          if (key.found.row == nullptr) {
            ++dropped;
            return;
          }
          std::copy_n(arrivals_[key.begin].row, dim, sum);
          for (int64_t a = key.begin + 1; a < key.end; ++a) AddTo(sum, arrivals_[a].row, dim);
          if (scale != 1.f) {
            for (int64_t j = 0; j < dim; ++j) sum[j] *= scale;
          }
          UpdateRow(rule, rates_, dim, sum, key.found,
                    table_->flags().shard(arrivals_[key.begin].shard), scratch->before.data());
        });
    dropped_ += dropped;
  }

  void CountDropped() { table_->updates().AddDropped(dropped_); }

 private:
  EmbeddingTable* table_ = nullptr;
  StepRates rates_;
  std::vector<Arrival> arrivals_;              // by shard, key and order in which they came
  std::vector<std::vector<ArrivedKey>> keys_;  // [tasks]
  std::atomic<int64_t> dropped_{0};            // keys without a row
};

}  // namespace

Status CheckSendBuffer(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const std::vector<int64_t>& row_floats) {
  if (buffer.ranks < 1) {
    return InvalidArgument("sizes are those of " + std::to_string(buffer.ranks) +
                           " ranks; allowed: those of one rank or more");
  }
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
    std::vector<TableUpdate> updates(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const int64_t step = plan.tables[t]->updates().step() + 1;
      const UpdateRule& rule = plan.tables[t]->options().rule;
      updates[t].Begin(plan, t, rule.RatesOf(options.learning_rate.Of(t), step));
    }
    const std::vector<int64_t> bounds = BalancedBuckets(plan.unique_begin, parallel.threads);
    std::vector<CollectTask> tasks(parallel.threads, CollectTask(plan.tables));
    SendBufferWriter writer(plan.tables, options.ranks, buffer);
    for (int task = 0; task < parallel.threads; ++task) {
      std::vector<int64_t> most(num_tables, 0);
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
        most[static_cast<size_t>(b / kNumShards)] += MostCollected(plan, b);
      }
      for (size_t t = 0; t < num_tables; ++t) writer.Expect(t, most[t], &tasks[task]);
    }
    status = writer.Reserve(options);
    if (!status.ok()) return status;
    parallel.run(parallel.threads, [&](int task) {
      UpdateBuckets(plan, gradients, {bounds[task], bounds[task + 1]}, &updates,
                    [&](const BucketUpdate& update, int64_t /*next*/) {
                      UpdateBucketByPolicy(update, &tasks[task].scratch,
                                           &tasks[task].rows[update.bucket / kNumShards]);
                    });
    });
    if (options.advance_step) {
      for (EmbeddingTable* table : plan.tables) table->updates().NextStep();
    }
    writer.Pack(tasks);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("collecting gradients", plan.tables);
  }
  return OkStatus();
}

Status CollectAllDeferred(const std::vector<EmbeddingTable*>& tables, const CollectOptions& options,
                          SendBuffer* buffer) try {
  const ExclusiveTableLocks locks(tables);
  std::vector<CollectTask> tasks(1, CollectTask(tables));
  SendBufferWriter writer(tables, options.ranks, buffer);
  for (size_t t = 0; t < tables.size(); ++t) {
    writer.Expect(t, tables[t]->updates().num_deferred(), &tasks[0]);
  }
  const Status status = writer.Reserve(options);
  if (!status.ok()) return status;
  for (size_t t = 0; t < tables.size(); ++t) {
    CollectDeferred(tables[t], &tasks[0].scratch, &tasks[0].rows[t]);
  }
  writer.Pack(tasks);
  return OkStatus();
} catch (const std::bad_alloc&) {
  return OutOfMemory("collecting deferred gradients", tables);
}

Status ApplyRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                 const ApplyOptions& options, const Parallel& parallel) {
  std::vector<int64_t> dims;
  for (const EmbeddingTable* table : tables) dims.push_back(table->dim());
  Status status = options.learning_rate.Check(tables.size());
  if (!status.ok()) return status;
  for (size_t t = 0; t < tables.size() && status.ok(); ++t) {
    status = tables[t]->CheckRate(options.learning_rate.Of(t));
  }
  if (!status.ok()) return status;
  status = CheckSendBuffer(tables, buffer, dims);
  if (!status.ok()) return status;
  const ExclusiveTableLocks locks(tables);
  try {
    std::vector<TableArrivals> arrivals(tables.begin(), tables.end());
    const int64_t *keys = buffer.keys, *rows = buffer.sizes;
    const float* values = buffer.values;
    for (int rank = 0; rank < buffer.ranks; ++rank) {
      for (size_t t = 0; t < tables.size(); ++t, ++rows) {
        status = arrivals[t].Add(keys, values, *rows);
        if (!status.ok()) return status;
        keys += *rows;
        values += *rows * dims[t];
      }
    }
    for (TableArrivals& of_table : arrivals) of_table.Sort(parallel.threads);
    std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch(tables));
    const std::function<void(int)> update_rows = [&](int task) {
      for (TableArrivals& of_table : arrivals) {
        of_table.Update(task, options.scale, &scratches[task]);
      }
    };
    parallel.run(parallel.threads, [&](int task) {
      for (TableArrivals& of_table : arrivals) of_table.Find(task, options.create_missing);
    });
    // After rows were made.
    const bool is_any_swept = std::any_of(tables.begin(), tables.end(),
                                          [](const EmbeddingTable* t) { return IsSwept(*t); });
    std::vector<SweepScratch> sweeps;
    for (int task = 0; is_any_swept && task < parallel.threads; ++task) sweeps.emplace_back(tables);
    const std::function<void(int)> sweep_rows = [&](int task) {
      for (const TableArrivals& of_table : arrivals) of_table.Sweep(task, &sweeps[task]);
    };
    // From here on nothing needs memory: rows are updated all or none.
    for (size_t t = 0; t < arrivals.size(); ++t) {
      arrivals[t].BeginUpdate(options.learning_rate.Of(t));
    }
    parallel.run(parallel.threads, update_rows);
    if (is_any_swept) parallel.run(parallel.threads, sweep_rows);
    for (TableArrivals& of_table : arrivals) of_table.CountDropped();
  } catch (const std::bad_alloc&) {
    return OutOfMemory("applying the ranks' gradients", tables);
  }
  return OkStatus();
}

}  // namespace slipstream
