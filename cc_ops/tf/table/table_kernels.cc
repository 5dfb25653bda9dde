// Kernels that create a table and read or replace its rows.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/measurement.h"
#include "cc_ops/core/table/table_locks.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

class TableOp : public tf::OpKernel {
 public:
  explicit TableOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    std::string eviction, initializer, rule;
    int64_t seed = 0;
    OP_REQUIRES_OK(c, c->GetAttr("table_name", &options_.name));
    OP_REQUIRES_OK(c, c->GetAttr("dim", &options_.dim));
    OP_REQUIRES_OK(c, c->GetAttr("capacity", &options_.capacity));
    OP_REQUIRES_OK(c, c->GetAttr("eviction", &eviction));
    OP_REQUIRES_OK(c, c->GetAttr("initializer", &initializer));
    OP_REQUIRES_OK(c, c->GetAttr("initializer_a", &options_.initializer.a));
    OP_REQUIRES_OK(c, c->GetAttr("initializer_b", &options_.initializer.b));
    OP_REQUIRES_OK(c, c->GetAttr("seed", &seed));
    OP_REQUIRES_OK(c, c->GetAttr("rule", &rule));
    std::vector<float> parameters;
    OP_REQUIRES_OK(c, c->GetAttr("rule_parameters", &parameters));
    OP_REQUIRES_OK(c, ToAbsl(UpdateRule::Make(rule, parameters, &options_.rule)));
    std::vector<float> transforms;
    OP_REQUIRES_OK(c, c->GetAttr("transforms", &transforms));
    OP_REQUIRES(c, transforms.empty() || transforms.size() == 6,
                absl::InvalidArgumentError(absl::StrCat("transforms has ", transforms.size(),
                                                        " numbers; expected 0 or 6")));
    if (!transforms.empty()) {
      options_.rule.transforms = {transforms[0], transforms[1], transforms[2],
                                  transforms[3], transforms[4], transforms[5] != 0.f};
    }
    options_.initializer.seed = static_cast<uint64_t>(seed);
    options_.eviction =
        eviction == "lru" ? TableOptions::Eviction::kLru : TableOptions::Eviction::kLfu;
    using Init = RowInitializer::Kind;
    options_.initializer.kind = initializer == "zeros"      ? Init::kZeros
                                : initializer == "constant" ? Init::kConstant
                                : initializer == "uniform"  ? Init::kUniform
                                : initializer == "normal"   ? Init::kNormal
                                                            : Init::kTruncatedNormal;
    OP_REQUIRES_OK(c, ReadRowDtype(c, "dtype", &options_.dtype));
    OP_REQUIRES_OK(c, ReadRowDtype(c, "slot_dtype", &options_.slot_dtype));
    OP_REQUIRES_OK(c, c->GetAttr("memory", &options_.memory));
    OP_REQUIRES_OK(c, c->GetAttr("spill", &options_.spill));
    OP_REQUIRES_OK(c, c->GetAttr("admit_after", &options_.admit_after));
    OP_REQUIRES_OK(c, c->GetAttr("expire_after", &options_.expire_after));
    OP_REQUIRES_OK(c, c->GetAttr("expires_by_seconds", &options_.expires_by_seconds));
    OP_REQUIRES_OK(c, ToAbsl(ValidateTableOptions(options_)));
  }

  void Compute(tf::OpKernelContext* c) override {
    tf::core::RefCountPtr<TableResource> resource(new TableResource(options_));
    OP_REQUIRES_OK(c, ToAbsl(resource->table()->Open()));
    OP_REQUIRES_OK(c, OutputResource(c, std::move(resource)));
  }

 private:
  TableOptions options_;
};

absl::Status Gather(tf::OpKernelContext* c, EmbeddingTable* table) {
  int64_t dim = 0;
  TF_RETURN_IF_ERROR(ReadAttribute(c, "dim", &dim));
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "keys: [n]", *table));
  if (dim != table->dim()) {
    return absl::InvalidArgumentError(absl::StrCat("dim is ", dim, "; expected ", table->dim(),
                                                   ", the dim of table '", table->options().name,
                                                   "'"));
  }
  const int64_t n = c->input(1).NumElements();
  float* rows = nullptr;
  bool* found = nullptr;
  TF_RETURN_IF_ERROR(Allocate(c, 0, tf::TensorShape({n, dim}), &rows));
  TF_RETURN_IF_ERROR(Allocate(c, 1, tf::TensorShape({n}), &found));
  const ReadingTableLocks lock({table});
  const int64_t* const keys = Data<int64_t>(c, 1);
  return ToAbsl(table->rows().ForPartsInMemory(
      keys, n, /*reads=*/true, "a read needs", ParallelOf(c), [&](int64_t begin, int64_t end) {
        table->rows().Gather(keys + begin, end - begin, ParallelOf(c), rows + begin * dim,
                             found + begin);
      }));
}

absl::Status Measure(tf::OpKernelContext* c, EmbeddingTable* table) {
  std::string metric;
  TF_RETURN_IF_ERROR(ReadAttribute(c, "metric", &metric));
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "keys: [n], snapshot: [n, d]", *table));
  const tf::TensorShape& shape = c->input(1).shape();
  float *rows = nullptr, *drift = nullptr;
  bool* found = nullptr;
  TF_RETURN_IF_ERROR(Allocate(c, 0, c->input(2).shape(), &rows));
  TF_RETURN_IF_ERROR(Allocate(c, 1, shape, &found));
  TF_RETURN_IF_ERROR(Allocate(c, 2, shape, &drift));
  const ReadingTableLocks lock({table});
  const int64_t* const keys = Data<int64_t>(c, 1);
  return ToAbsl(table->rows().ForPartsInMemory(
      keys, shape.num_elements(), /*reads=*/true, "a measurement needs", ParallelOf(c),
      [&](int64_t begin, int64_t end) {
        const int64_t first = begin * table->dim();
        MeasureRows(*table, keys + begin, Data<float>(c, 2) + first, end - begin,
                    DriftMetricNamed(metric), ParallelOf(c), rows + first, found + begin,
                    drift + begin);
      }));
}

absl::Status HotKeys(tf::OpKernelContext* c, EmbeddingTable* table) {
  using Order = RowStore::HotKeyOrder;
  bool by_key = false;
  int64_t k = 0;
  TF_RETURN_IF_ERROR(ReadAttribute(c, "by_key", &by_key));
  TF_RETURN_IF_ERROR(ReadScalar(c, 1, "k", &k));
  if (k < 0) return absl::InvalidArgumentError(absl::StrCat("k is ", k, "; expected at least 0"));
  std::vector<int64_t> keys;
  std::vector<float> counts;
  {
    const SharedLock lock(table->mutex());
    table->rows().HotKeys(k, by_key ? Order::kByKey : Order::kByCount, ParallelOf(c), &keys,
                          &counts);
  }
  TF_RETURN_IF_ERROR(Output(c, 0, keys));
  return Output(c, 1, counts);
}

absl::Status DecayCounts(tf::OpKernelContext* c, EmbeddingTable* table) {
  float factor = 0.f;
  TF_RETURN_IF_ERROR(ReadScalar(c, 1, "factor", &factor));
  if (!(factor >= 0.f && factor <= 1.f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("factor is ", factor, "; expected a number from 0 to 1"));
  }
  const ExclusiveLock lock(table->mutex());
  table->rows().DecayCounts(factor);
  return absl::OkStatus();
}

absl::Status Statistics(tf::OpKernelContext* c, EmbeddingTable* table) {
  std::vector<int64_t> values;
  {
    const SharedLock lock(table->mutex());
    const RowStore& rows = table->rows();
    values = {rows.size(),
              table->bytes(),
              rows.num_evicted(),
              table->updates().num_dropped(),
              rows.index_capacity(),
              rows.num_expired(),
              rows.num_not_admitted()};
  }
  return Output(c, 0, values);
}

absl::Status SpillStatisticsOf(tf::OpKernelContext* c, EmbeddingTable* table) {
  std::vector<int64_t> values;
  {
    const SharedLock lock(table->mutex());
    const SpilledRows* const spilled = table->rows().spilled();
    SpillStatistics found;
    found.rows_in_memory = table->rows().size();
    if (spilled != nullptr) found = spilled->statistics();
    values = {found.rows_in_memory, found.rows_on_disk, found.disk_bytes,
              found.rows_read,      found.reads_ahead,  found.rows_written};
  }
  return Output(c, 0, values);
}

absl::Status PrefetchRows(tf::OpKernelContext* c, EmbeddingTable* table) {
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "keys: [n]", *table));
  const SharedLock lock(table->mutex());
  SpilledRows* const spilled = table->rows().spilled();
  if (spilled != nullptr) spilled->PrefetchRows(Data<int64_t>(c, 1), c->input(1).NumElements());
  return absl::OkStatus();
}

absl::Status Step(tf::OpKernelContext* c, EmbeddingTable* table) {
  const SharedLock lock(table->mutex());
  return OutputScalar(c, 0, table->updates().step());
}

absl::Status Keys(tf::OpKernelContext* c, EmbeddingTable* table) {
  std::vector<int64_t> keys;
  {
    const SharedLock lock(table->mutex());
    keys = table->rows().Keys();
  }
  return Output(c, 0, keys);
}

absl::Status Write(tf::OpKernelContext* c, EmbeddingTable* table) {
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "keys: [n], rows: [n, d]", *table));
  const ExclusiveLock lock(table->mutex());
  return ToAbsl(table->Write(Data<int64_t>(c, 1), Data<float>(c, 2), c->input(1).NumElements(),
                             ParallelOf(c)));
}

absl::Status Remove(tf::OpKernelContext* c, EmbeddingTable* table) {
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "keys: [n]", *table));
  const ExclusiveLock lock(table->mutex());
  return OutputScalar(c, 0, table->Remove(Data<int64_t>(c, 1), c->input(1).NumElements()));
}

absl::Status ClearRows(tf::OpKernelContext* /*c*/, EmbeddingTable* table) {
  const ExclusiveLock lock(table->mutex());
  return ToAbsl(table->Clear());
}

absl::Status ShrinkRows(tf::OpKernelContext* c, EmbeddingTable* table) {
  const ExclusiveLock lock(table->mutex());
  const int64_t before = table->bytes();
  table->Shrink();
  return OutputScalar(c, 0, std::max<int64_t>(0, before - table->bytes()));
}

absl::Status SpillsError(const EmbeddingTable& table) {
  return absl::InvalidArgumentError(
      absl::StrCat("table '", table.options().name,
                   "' spills rows to disk; expected a table with all rows in memory"));
}

// Writes the rows of the entries to the first six outputs, in the order of the entries. Without
// values it writes four outputs: all but rows and slots.
absl::Status OutputRows(tf::OpKernelContext* c, const EmbeddingTable& table,
                        const std::vector<HashIndex::Entry>& entries, bool with_values = true) {
  const RowStore& rows = table.rows();
  const auto n = static_cast<int64_t>(entries.size());
  const int64_t timed = rows.tracks_use() ? n : 0;
  ContentsRoom room = {};
  int output = 0;
  TF_RETURN_IF_ERROR(Allocate(c, output++, tf::TensorShape({n}), &room.keys));
  if (with_values) {
    const tf::TensorShape slots({n, table.slots_per_row()});
    TF_RETURN_IF_ERROR(Allocate(c, output++, tf::TensorShape({n, table.dim()}), &room.rows));
    TF_RETURN_IF_ERROR(Allocate(c, output++, slots, &room.slots));
  }
  TF_RETURN_IF_ERROR(Allocate(c, output++, tf::TensorShape({n}), &room.counts));
  TF_RETURN_IF_ERROR(Allocate(c, output++, tf::TensorShape({timed}), &room.last_used));
  TF_RETURN_IF_ERROR(ToAbsl(rows.Export(entries, room)));
  return Output(c, output, std::vector<int64_t>{table.updates().step(), rows.lookup_step()});
}

absl::Status Export(tf::OpKernelContext* c, EmbeddingTable* table) {
  bool flushes = true;
  TF_RETURN_IF_ERROR(ReadAttribute(c, "flushes", &flushes));
  const ExclusiveLock lock(table->mutex());
  if (flushes) TF_RETURN_IF_ERROR(ToAbsl(FlushDeferred(table, ParallelOf(c))));
  return OutputRows(c, *table, table->rows().Entries());
}

absl::Status ExportReplicas(tf::OpKernelContext* c, EmbeddingTable* table) {
  const SharedLock lock(table->mutex());
  if (table->rows().spilled() != nullptr) return SpillsError(*table);
  const std::vector<HashIndex::Entry> entries = table->rows().Entries();
  std::vector<uint8_t> flags(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    flags[i] = table->flags().shard(ShardOf(entries[i].key))->Of(entries[i].index);
  }
  TF_RETURN_IF_ERROR(OutputRows(c, *table, entries, /*with_values=*/false));
  return Output(c, 4, flags);
}

absl::Status ExportChanges(tf::OpKernelContext* c, EmbeddingTable* table) {
  int64_t since = 0;
  TF_RETURN_IF_ERROR(ReadScalar(c, 1, "since", &since));
  const ExclusiveLock lock(table->mutex());
  if (table->rows().spilled() != nullptr) return SpillsError(*table);
  const RowChanges changes = table->rows().TakeChanges(since);
  TF_RETURN_IF_ERROR(OutputRows(c, *table, changes.rows));
  TF_RETURN_IF_ERROR(Output(c, 6, changes.removed));
  TF_RETURN_IF_ERROR(Output(c, 7, changes.decays));
  TF_RETURN_IF_ERROR(OutputScalar(c, 8, changes.is_all));
  return OutputScalar(c, 9, changes.number);
}

absl::Status ExportAdmission(tf::OpKernelContext* c, EmbeddingTable* table) {
  std::vector<uint8_t> counters;
  std::vector<int64_t> added(kNumShards);
  {
    const SharedLock lock(table->mutex());
    const std::vector<CountFilter>& filters = table->rows().filters();
    const bool any = std::any_of(filters.begin(), filters.end(),
                                 [](const CountFilter& f) { return !f.counters().empty(); });
    if (any) counters.resize(kNumShards * CountFilter::kCounters);
    for (size_t s = 0; s < filters.size(); ++s) {
      const std::vector<uint8_t>& own = filters[s].counters();
      std::copy(own.begin(), own.end(),
                counters.begin() + static_cast<int64_t>(s) * CountFilter::kCounters);
      added[s] = filters[s].added();
    }
  }
  TF_RETURN_IF_ERROR(Output(c, 0, counters));
  return Output(c, 1, added);
}

absl::Status ImportAdmission(tf::OpKernelContext* c, EmbeddingTable* table) {
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "counters: [n], added: [m]", *table));
  const int64_t n = c->input(1).NumElements();
  constexpr int64_t kAll = kNumShards * CountFilter::kCounters;
  if ((n != 0 && n != kAll) || c->input(2).NumElements() != kNumShards) {
    return absl::InvalidArgumentError(absl::StrCat(
        "counters and added have ", n, " and ", c->input(2).NumElements(),
        " elements; expected 0 or ", kAll, " counters and ", kNumShards, " elements of added"));
  }
  const uint8_t* const counters = Data<uint8_t>(c, 1);
  const int64_t* const added = Data<int64_t>(c, 2);
  const ExclusiveLock lock(table->mutex());
  std::vector<CountFilter>& filters = table->rows().filters();
  for (size_t s = 0; s < filters.size(); ++s) {
    const uint8_t* const own = counters + static_cast<int64_t>(s) * CountFilter::kCounters;
    filters[s].Restore(
        n == 0 ? std::vector<uint8_t>() : std::vector<uint8_t>(own, own + CountFilter::kCounters),
        std::max<int64_t>(0, added[s]));
  }
  return absl::OkStatus();
}

absl::Status Import(tf::OpKernelContext* c, EmbeddingTable* table) {
  TF_RETURN_IF_ERROR(CheckInputs(
      c, 1, "keys: [n], rows: [n, d], slots: [n, s], counts: [?], last_used: [?], steps: [2]",
      *table));
  const int64_t* const steps = Data<int64_t>(c, 6);
  const TableContents contents = {ValuesOf<int64_t>(c, 1),
                                  ValuesOf<float>(c, 2),
                                  ValuesOf<float>(c, 3),
                                  ValuesOf<float>(c, 4),
                                  ValuesOf<int64_t>(c, 5),
                                  steps[0],
                                  steps[1]};
  bool adds = false;
  TF_RETURN_IF_ERROR(ReadAttribute(c, "adds", &adds));
  const ExclusiveLock lock(table->mutex());
  return ToAbsl(adds ? table->rows().Add(contents) : table->Import(contents));
}

absl::Status Release(tf::OpKernelContext*, TableResource* resource) {
  resource->Release();
  return absl::OkStatus();
}

SLIPSTREAM_CPU_KERNEL("SlipstreamTable", TableOp);
SLIPSTREAM_TABLE_KERNEL("Gather", Gather);
SLIPSTREAM_TABLE_KERNEL("Measure", Measure);
SLIPSTREAM_TABLE_KERNEL("HotKeys", HotKeys);
SLIPSTREAM_TABLE_KERNEL("DecayCounts", DecayCounts);
SLIPSTREAM_TABLE_KERNEL("Statistics", Statistics);
SLIPSTREAM_TABLE_KERNEL("SpillStatistics", SpillStatisticsOf);
SLIPSTREAM_TABLE_KERNEL("PrefetchRows", PrefetchRows);
SLIPSTREAM_TABLE_KERNEL("Step", Step);
SLIPSTREAM_TABLE_KERNEL("Keys", Keys);
SLIPSTREAM_TABLE_KERNEL("Write", Write);
SLIPSTREAM_TABLE_KERNEL("Remove", Remove);
SLIPSTREAM_TABLE_KERNEL("Clear", ClearRows);
SLIPSTREAM_TABLE_KERNEL("Shrink", ShrinkRows);
SLIPSTREAM_TABLE_KERNEL("Export", Export);
SLIPSTREAM_TABLE_KERNEL("ExportReplicas", ExportReplicas);
SLIPSTREAM_TABLE_KERNEL("ExportChanges", ExportChanges);
SLIPSTREAM_TABLE_KERNEL("ExportAdmission", ExportAdmission);
SLIPSTREAM_TABLE_KERNEL("ImportAdmission", ImportAdmission);
SLIPSTREAM_TABLE_KERNEL("Import", Import);
SLIPSTREAM_CPU_KERNEL("SlipstreamTableRelease", ResourceKernel<Release>);

}  // namespace
}  // namespace slipstream
