#include "cc_ops/core/exchange/push.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <new>
#include <string>
#include <utility>

#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"
#include "cc_ops/core/update/checked_update.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/core/update/row_sweep.h"

namespace slipstream {
namespace {

// Whether a bucket collects exactly the sums of this batch.
bool CollectsSums(const BucketUpdate& bucket) {
  const int64_t shard = bucket.bucket % kNumShards;
  const std::vector<DeferredGradients>& deferred = bucket.table->updates().shard(shard)->deferred;
  return !bucket.table->UpdatesByPolicy(shard) &&
         std::all_of(deferred.begin(), deferred.end(),
                     [](const DeferredGradients& sums) { return sums.size() == 0; });
}

SLIPSTREAM_SIMD_CLONES void CollectSums(const BucketUpdate& bucket, CollectedRows* collected) {
  const LookupPlan& plan = *bucket.plan;
  const CellRange keys = KeysOf(plan, bucket.bucket);
  const int64_t dim = bucket.table->dim(), count = keys.end - keys.begin;
  collected->keys.insert(collected->keys.end(), plan.unique_key.begin() + keys.begin,
                         plan.unique_key.begin() + keys.end);
  const size_t values = collected->rows.size();
  collected->rows.resize(values + static_cast<size_t>(count * dim));
  float* sum = collected->rows.data() + values;
  int64_t use = keys.begin;
  for (int64_t u = keys.begin; u < keys.end; ++u, sum += dim) {
    SumUses(plan, *bucket.gradients, use, plan.uses_end[u], dim, sum);
    use = plan.uses_end[u];
  }
  UpdateCounts* const counts = &bucket.table->updates().shard(bucket.bucket % kNumShards)->counts;
  counts->offered += count;
  counts->sent += count;
}

// A gradient row from a rank. The rows of a table are stored in the order of their arrival.
struct Arrival {
  int64_t key;
  const float* row;
  bool operator<(const Arrival& other) const {
    return key != other.key ? key < other.key : row < other.row;
  }
};

// A key with the arrivals [begin, end), and its row, if it exists.
struct ArrivedKey {
  int64_t begin, end;
  FoundRow found;
};

// Processes the arrivals of one table in passes. Only the first two allocate memory.
class TableArrivals {
 public:
  explicit TableArrivals(EmbeddingTable* table) : table_(table) {}

  // Adds rows of one rank.
  void Expect(const int64_t* keys, const float* rows, int64_t n) {
    if (n > 0) parts_.push_back({keys, rows, n});
  }

  // Sorts all rows by shard. Returns InvalidArgument if a row is not finite. ranks: of the buffer.
  Status Sort(int ranks, int tasks) {
    const int64_t dim = table_->dim();
    std::vector<int64_t> next(kNumShards, 0);
    for (const Part& part : parts_) {
      for (int64_t i = 0; i < part.n; ++i) ++next[ShardOf(part.keys[i])];
      const float pair[] = {largest_, LargestMagnitude(part.rows, part.n * dim)};
      largest_ = LargestMagnitude(pair, 2);
      if (std::isfinite(largest_)) continue;
      const std::string& cause = table_->updates().lost_cause();
      if (!cause.empty()) return InvalidArgument(cause);
      const int64_t bad = FirstNonFinite(part);
      return InvalidArgument("the " + std::string(ranks == 1 ? "" : "received ") +
                             "gradient of key " + std::to_string(part.keys[bad]) + " of table '" +
                             table_->options().name +
                             "' is not finite; expected finite values. No row was updated");
    }
    max_arrivals_ = *std::max_element(next.begin(), next.end());
    shard_begin_.assign(kNumShards + 1, 0);
    for (int s = 0; s < kNumShards; ++s) {
      shard_begin_[s + 1] = shard_begin_[s] + next[s];
      next[s] = shard_begin_[s];
    }
    arrivals_.resize(static_cast<size_t>(shard_begin_[kNumShards]));
    for (const Part& part : parts_) {
      for (int64_t i = 0; i < part.n; ++i) {
        arrivals_[next[ShardOf(part.keys[i])]++] = {part.keys[i], part.rows + i * dim};
      }
    }
    keys_.resize(static_cast<size_t>(tasks));
    return OkStatus();
  }

  // Loads the rows that are on disk.
  Status LoadRow(const Parallel& parallel) const {
    if (table_->rows().spilled() == nullptr) return OkStatus();
    const std::vector<int64_t> keys = Keys();
    return table_->rows().LoadRow(keys.data(), static_cast<int64_t>(keys.size()),
                                  /*reads=*/false, "the gradients of all ranks need", parallel);
  }

  // Finds or creates the rows in the shards of a task.
  void Find(int task, bool create_missing) {
    const CellRange shards = ShardsOf(task);
    const int64_t first = shard_begin_[shards.begin], last = shard_begin_[shards.end];
    // There are at least as many arrivals as keys.
    keys_[task].reserve(static_cast<size_t>(last - first));
    int64_t ahead = first;
    for (int64_t s = shards.begin; s < shards.end; ++s) {
      const auto end = arrivals_.begin() + shard_begin_[s + 1];
      auto begin = arrivals_.begin() + shard_begin_[s];
      std::sort(begin, end);
      while (begin != end) {
        const int64_t key = begin->key;
        const auto next =
            std::find_if(begin, end, [&](const Arrival& other) { return other.key != key; });
        const int64_t at = begin - arrivals_.begin(), after = next - arrivals_.begin();
        for (; ahead < std::min(at + kIndexAhead, last); ++ahead) {
          table_->rows().Prefetch(arrivals_[ahead].key);
        }
        FoundRow found = {nullptr, 0};
        found.row = create_missing ? table_->rows().FindOrInsert(key, 0.f, &found.index)
                                   : table_->rows().Find(key, &found.index);
        keys_[task].push_back({at, after, found});
        begin = next;
      }
    }
  }

  // Returns the keys of all rows.
  std::vector<int64_t> Keys() const {
    std::vector<int64_t> keys;
    for (const Arrival& arrival : arrivals_) keys.push_back(arrival.key);
    return keys;
  }

  // Returns whether the update surely gives finite rows (SurelyFits). scale: factor of the sums.
  bool Fits(float learning_rate, float scale) const {
    const double factor = std::max(1., static_cast<double>(std::fabs(scale)));
    return SurelyFits(*table_, table_->NextRates(learning_rate),
                      SumBound(max_arrivals_, largest_, factor));
  }

  // Begins the update of all rows.
  void BeginUpdate(float learning_rate) { rates_ = table_->BeginUpdate(learning_rate); }

  // Updates the other rows in the shards of a task, if the table requires it.
  void Sweep(int task, SweepScratch* scratch) const {
    if (!IsSwept(*table_)) return;
    const std::vector<ArrivedKey>& keys = keys_[task];
    const CellRange shards = ShardsOf(task);
    auto key = keys.begin();
    for (int64_t s = shards.begin; s < shards.end; ++s) {
      ShardSweep sweep(table_, s, scratch);
      for (; key != keys.end() && key->begin < shard_begin_[s + 1]; ++key) {
        sweep.Exclude(arrivals_[key->begin].key);
      }
      sweep.UpdateOthers(rates_);
    }
  }

  // Applies the sum of each key of a task to its row.
  void Update(int task, float scale, PolicyScratch* scratch) {
    const std::vector<ArrivedKey>& keys = keys_[task];
    const int64_t dim = table_->dim(), num_keys = static_cast<int64_t>(keys.size());
    float* const sum = scratch->row.sum.data();
    int64_t dropped = 0;
    UpdateEach(
        {0, num_keys}, {num_keys, num_keys},
        [&](int64_t i, bool /*is_next*/) SLIPSTREAM_LAMBDA_INLINE {
          PrefetchBytes(keys[i].found.row, table_->rows().layout().bytes());
        },
        [&](int64_t i) {
          const ArrivedKey& key = keys[i];
          if (key.found.row == nullptr) {
            ++dropped;
            return;
          }
          std::copy_n(arrivals_[key.begin].row, dim, sum);
          for (int64_t a = key.begin + 1; a < key.end; ++a) AddTo(sum, arrivals_[a].row, dim);
          for (int64_t j = 0; j < dim; ++j) sum[j] *= scale;
          const int64_t of_key = arrivals_[key.begin].key;
          UpdateRow(table_, rates_, of_key, sum, key.found, &scratch->row);
        });
    dropped_ += dropped;
  }

  void CountDropped() { table_->updates().AddDropped(dropped_); }

 private:
  // Rows of one rank.
  struct Part {
    const int64_t* keys;
    const float* rows;
    int64_t n;
  };
  // Number of arrivals whose index lines are prefetched ahead.
  static constexpr int64_t kIndexAhead = 16;

  CellRange ShardsOf(int task) const {
    return CellsOf(task, static_cast<int>(keys_.size()), kNumShards);
  }
  // Returns the first row that is not finite; there must be one.
  int64_t FirstNonFinite(const Part& part) const {
    int64_t i = 0;
    while (RowIsFinite(part.rows + i * table_->dim(), table_->dim())) ++i;
    return i;
  }

  EmbeddingTable* table_ = nullptr;
  StepRates rates_;
  float largest_ = 0.f;       // Largest magnitude of the rows.
  int64_t max_arrivals_ = 0;  // Maximum number of rows per shard; a key has at most as many.
  std::vector<Part> parts_;
  std::vector<Arrival> arrivals_;              // By shard; after Find, by key and order of arrival.
  std::vector<int64_t> shard_begin_;           // [shards + 1]; positions in `arrivals_`.
  std::vector<std::vector<ArrivedKey>> keys_;  // [tasks]
  std::atomic<int64_t> dropped_{0};            // Keys without a row.
};

// Rows that an update creates, to remove them if it fails.
class NewRows {
 public:
  // Call it before the rows of the keys are created.
  void Expect(EmbeddingTable* table, std::vector<int64_t> keys) {
    const auto has_row = [&](int64_t key) { return table->rows().Has(key); };
    keys.erase(std::remove_if(keys.begin(), keys.end(), has_row), keys.end());
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    tables_.emplace_back(table, std::move(keys));
  }
  void Remove() {
    for (auto& [table, keys] : tables_) {
      const auto is_absent = [rows = &table->rows()](int64_t key) { return !rows->Has(key); };
      keys.erase(std::remove_if(keys.begin(), keys.end(), is_absent), keys.end());
      table->rows().Remove(keys);
    }
  }

 private:
  std::vector<std::pair<EmbeddingTable*, std::vector<int64_t>>> tables_;
};

Status CheckScale(const std::vector<EmbeddingTable*>& tables, const std::vector<float>& scale) {
  if (!scale.empty() && scale.size() != tables.size()) {
    return InvalidArgument("scale has " + std::to_string(scale.size()) + " values; expected 0 or " +
                           std::to_string(tables.size()) + ", a value per table");
  }
  for (size_t t = 0; t < scale.size(); ++t) {
    if (std::isfinite(scale[t])) continue;
    return InvalidArgument("scale[" + std::to_string(t) + "] is " + std::to_string(scale[t]) +
                           " for table '" + tables[t]->options().name +
                           "'; expected a finite number. No row was updated");
  }
  return OkStatus();
}

}  // namespace

Status CollectGradients(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                        const CollectOptions& options, const Parallel& parallel,
                        SendBuffer* buffer) {
  const size_t num_tables = plan.tables.size();
  Status status = options.learning_rate.Check(num_tables);
  if (!status.ok()) return status;
  float largest = 0.f;
  Status finite = CheckFinite(plan, gradients, options.learning_rate, parallel, &largest);
  if (!finite.ok() && !options.passes_non_finite) return finite;
  const ExclusiveTableLocks locks(plan.tables);
  try {
    // Whether a sum is collected depends on the row of its key.
    const Status rows = LoadForUpdate(plan, /*with_due=*/false, parallel);
    if (!rows.ok()) return rows;
    const SumBounds bounds(plan, finite.ok() ? largest : 0.f);
    if (finite.ok()) finite = bounds.CheckSums(gradients);
    const bool is_lost = !finite.ok();
    if (is_lost && !options.passes_non_finite) return finite;
    for (EmbeddingTable* table : plan.tables) {
      if (is_lost) table->updates().set_lost_cause(finite.message());
    }
    const PolicyScratch zeros(plan.tables);
    const std::vector<PooledGradient> none(gradients.size(), {zeros.row.sum.data(), 0});
    std::vector<TableUpdate> updates(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const int64_t step = plan.tables[t]->updates().step() + 1;
      const UpdateRule& rule = plan.tables[t]->options().rule;
      updates[t].Begin(plan, t, rule.RatesOf(options.learning_rate.Of(t), step));
    }
    const std::vector<int64_t> task_begin = BalancedBuckets(plan.unique_begin, parallel.threads);
    std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch(plan.tables));
    DeferredOfKeys deferred(plan);
    SendBufferWriter writer(plan.tables, options.ranks, parallel.threads, buffer);
    for (int task = 0; task < parallel.threads; ++task) {
      std::vector<int64_t> maximum(num_tables, 0);
      for (int64_t b = task_begin[task]; b < task_begin[task + 1]; ++b) {
        maximum[static_cast<size_t>(b / kNumShards)] += MaxCollected(plan, b);
      }
      for (size_t t = 0; t < num_tables; ++t) writer.Expect(task, t, maximum[t]);
    }
    status = writer.Reserve(options.reserve);
    if (!status.ok()) return status;
    parallel.run(parallel.threads, [&](int task) {
      const CellRange buckets = {task_begin[task], task_begin[task + 1]};
      deferred.Find(buckets);
      UpdateBuckets(plan, is_lost ? none : gradients, buckets, &updates,
                    [&](const BucketUpdate& update, int64_t next) {
                      const auto table = static_cast<size_t>(update.bucket / kNumShards);
                      CollectedRows* const rows = writer.Collected(task, table);
                      if (CollectsSums(update)) return CollectSums(update, rows);
                      UpdateBucketByPolicy(update, next, deferred, &scratches[task], rows);
                    });
    });
    for (size_t t = 0; t < num_tables; ++t) {
      UpdateState* const state = &plan.tables[t]->updates();
      if (options.advance_step) state->NextStep();
      state->set_deferred_bound(is_lost ? state->DeferredBound(0.) : bounds.Deferred(t));
    }
    writer.Pack(parallel);
    if (is_lost) writer.Fill(std::nanf(""));
  } catch (const std::bad_alloc&) {
    return OutOfMemory("collecting gradients", plan.tables);
  }
  return OkStatus();
}

Status CollectAllDeferred(const std::vector<EmbeddingTable*>& tables, const CollectOptions& options,
                          SendBuffer* buffer) try {
  const ExclusiveTableLocks locks(tables);
  PolicyScratch scratch(tables);
  SendBufferWriter writer(tables, options.ranks, 1, buffer);
  for (size_t t = 0; t < tables.size(); ++t) {
    writer.Expect(0, t, tables[t]->updates().num_deferred());
  }
  const Status status = writer.Reserve(options.reserve);
  if (!status.ok()) return status;
  for (size_t t = 0; t < tables.size(); ++t) {
    CollectDeferred(tables[t], &scratch, writer.Collected(0, t));
  }
  writer.Pack(Parallel());
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
  status = CheckScale(tables, options.scale);
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
        arrivals[t].Expect(keys, values, *rows);
        keys += *rows;
        values += *rows * dims[t];
      }
    }
    std::vector<Status> found(tables.size());
    parallel.run(parallel.threads, [&](int task) {
      const TaskRange own = RangeOf(task, parallel.threads, static_cast<int64_t>(tables.size()));
      for (int64_t t = own.begin; t < own.end; ++t) {
        found[t] = arrivals[t].Sort(buffer.ranks, parallel.threads);
      }
    });
    for (const Status& of_table : found) {
      if (!of_table.ok()) return of_table;
    }
    for (const TableArrivals& of_table : arrivals) {
      status = of_table.LoadRow(parallel);
      if (!status.ok()) return status;
    }
    std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch(tables));
    const auto scale_of = [&](size_t t) { return options.scale.empty() ? 1.f : options.scale[t]; };
    std::vector<char> fits(tables.size());
    for (size_t t = 0; t < tables.size(); ++t) {
      fits[t] = arrivals[t].Fits(options.learning_rate.Of(t), scale_of(t));
    }
    const bool is_any_checked = std::find(fits.begin(), fits.end(), false) != fits.end();
    NewRows new_rows;
    for (size_t t = 0; is_any_checked && t < tables.size(); ++t) {
      new_rows.Expect(tables[t], arrivals[t].Keys());
    }
    parallel.run(parallel.threads, [&](int task) {
      for (TableArrivals& of_table : arrivals) of_table.Find(task, options.create_missing);
    });
    std::vector<TableBackup> backups;
    for (size_t t = 0; t < tables.size(); ++t) {
      if (!fits[t]) backups.emplace_back(tables[t], arrivals[t].Keys());
    }
    // Allocated after rows were created, because a sweep has one flag per row.
    const bool is_any_swept = std::any_of(tables.begin(), tables.end(),
                                          [](const EmbeddingTable* t) { return IsSwept(*t); });
    std::vector<SweepScratch> sweeps;
    for (int task = 0; is_any_swept && task < parallel.threads; ++task) sweeps.emplace_back(tables);
    char is_fitting = false;  // Which of the tables the functions update.
    const std::function<void(int)> update_rows = [&](int task) {
      for (size_t t = 0; t < tables.size(); ++t) {
        if (fits[t] == is_fitting) arrivals[t].Update(task, scale_of(t), &scratches[task]);
      }
    };
    const std::function<void(int)> sweep_rows = [&](int task) {
      for (size_t t = 0; t < tables.size(); ++t) {
        if (fits[t] == is_fitting) arrivals[t].Sweep(task, &sweeps[task]);
      }
    };
    // No allocations after this point, so that either all rows or none are updated.
    const auto update_tables = [&] {
      for (size_t t = 0; t < tables.size(); ++t) {
        if (fits[t] == is_fitting) arrivals[t].BeginUpdate(options.learning_rate.Of(t));
      }
      parallel.run(parallel.threads, update_rows);
      if (is_any_swept) parallel.run(parallel.threads, sweep_rows);
    };
    if (is_any_checked) {
      update_tables();
      status = CheckOrRestore(&backups);
      if (!status.ok()) {
        new_rows.Remove();
        return status;
      }
    }
    is_fitting = true;
    if (backups.size() < tables.size()) update_tables();
    for (TableArrivals& of_table : arrivals) of_table.CountDropped();
  } catch (const std::bad_alloc&) {
    return OutOfMemory("applying the gradients of all ranks", tables);
  }
  return OkStatus();
}

}  // namespace slipstream
