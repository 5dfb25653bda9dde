// Kernels that make a table and read or replace what it holds.
#include <algorithm>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/measurement.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/table/one_table_op.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"

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
    OP_REQUIRES_OK(c, c->GetAttr("rule_a", &options_.rule.a));
    OP_REQUIRES_OK(c, c->GetAttr("rule_b", &options_.rule.b));
    OP_REQUIRES_OK(c, c->GetAttr("rule_c", &options_.rule.c));
    options_.initializer.seed = static_cast<uint64_t>(seed);
    options_.eviction =
        eviction == "lru" ? TableOptions::Eviction::kLru : TableOptions::Eviction::kLfu;
    using Init = RowInitializer::Kind;
    options_.initializer.kind = initializer == "zeros"      ? Init::kZeros
                                : initializer == "constant" ? Init::kConstant
                                : initializer == "uniform"  ? Init::kUniform
                                                            : Init::kNormal;
    using Rule = UpdateRule::Kind;
    options_.rule.kind = rule == "sgd"               ? Rule::kSgd
                         : rule == "adagrad"         ? Rule::kAdagrad
                         : rule == "rowwise_adagrad" ? Rule::kRowWiseAdagrad
                                                     : Rule::kAdam;
    OP_REQUIRES_OK(c, ToAbsl(ValidateTableOptions(options_)));
  }

  void Compute(tf::OpKernelContext* c) override {
    tf::Tensor* out = nullptr;
    tf::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    OP_REQUIRES_OK(c, c->allocate_output(0, tf::TensorShape({}), &out, on_host));
    out->scalar<tf::ResourceHandle>()() =
        tf::ResourceHandle::MakeRefCountingHandle(new TableResource(options_), c->device()->name());
  }

 private:
  TableOptions options_;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTable").Device(tf::DEVICE_CPU), MemoryChecked<TableOp>);

class GatherOp : public OneTableOp {
 public:
  explicit GatherOp(tf::OpKernelConstruction* c) : OneTableOp(c) {
    OP_REQUIRES_OK(c, c->GetAttr("dim", &dim_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    if (dim_ != table->dim()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "dim is ", dim_, "; table '", table->options().name, "' has dim ", table->dim()));
    }
    const tf::Tensor& keys = c->input(1);
    const int64_t n = keys.NumElements();
    tf::Tensor *rows = nullptr, *found = nullptr;
    TF_RETURN_IF_ERROR(c->allocate_output(0, tf::TensorShape({n, dim_}), &rows));
    TF_RETURN_IF_ERROR(c->allocate_output(1, tf::TensorShape({n}), &found));
    const SharedLock lock(table->mutex());
    table->rows().Gather(keys.flat<int64_t>().data(), n, ParallelOf(c), rows->flat<float>().data(),
                         found->flat<bool>().data());
    return absl::OkStatus();
  }

 private:
  int64_t dim_ = 0;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableGather").Device(tf::DEVICE_CPU),
                        MemoryChecked<GatherOp>);

class MeasureOp : public OneTableOp {
 public:
  explicit MeasureOp(tf::OpKernelConstruction* c) : OneTableOp(c) {
    std::string metric;
    OP_REQUIRES_OK(c, c->GetAttr("metric", &metric));
    // The registration allows no other value.
    measurement_.is_signal = metric == "signal";
    if (!measurement_.is_signal) measurement_.metric = DriftMetricNamed(metric);
  }

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    const tf::Tensor &keys = c->input(1), &snapshot = c->input(2);
    const int64_t n = keys.NumElements();
    const tf::TensorShape shape({n, table->dim()});
    if (snapshot.shape() != shape) {
      return absl::InvalidArgumentError(absl::StrCat("snapshot of table '", table->options().name,
                                                     "' has shape ", snapshot.shape().DebugString(),
                                                     "; allowed: ", shape.DebugString(),
                                                     ", a row for each key"));
    }
    tf::Tensor *rows = nullptr, *found = nullptr, *drift = nullptr;
    TF_RETURN_IF_ERROR(c->allocate_output(0, shape, &rows));
    TF_RETURN_IF_ERROR(c->allocate_output(1, keys.shape(), &found));
    TF_RETURN_IF_ERROR(c->allocate_output(2, keys.shape(), &drift));
    const SharedLock lock(table->mutex());
    MeasureRows(*table, keys.flat<int64_t>().data(), snapshot.flat<float>().data(), n, measurement_,
                ParallelOf(c), rows->flat<float>().data(), found->flat<bool>().data(),
                drift->flat<float>().data());
    return absl::OkStatus();
  }

 private:
  Measurement measurement_;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableMeasure").Device(tf::DEVICE_CPU),
                        MemoryChecked<MeasureOp>);

class HotKeysOp : public OneTableOp {
 public:
  explicit HotKeysOp(tf::OpKernelConstruction* c) : OneTableOp(c) {
    bool by_key = false;
    OP_REQUIRES_OK(c, c->GetAttr("by_key", &by_key));
    if (by_key) order_ = RowStore::HotKeyOrder::kByKey;
  }

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "k", 0));
    const int64_t k = c->input(1).scalar<int64_t>()();
    if (k < 0) return absl::InvalidArgumentError(absl::StrCat("k is ", k, "; allowed: 0 or more"));
    std::vector<int64_t> keys;
    std::vector<float> counts;
    {
      const SharedLock lock(table->mutex());
      table->rows().HotKeys(k, order_, ParallelOf(c), &keys, &counts);
    }
    const tf::TensorShape shape({static_cast<int64_t>(keys.size())});
    TF_RETURN_IF_ERROR(Output(c, 0, shape, keys));
    return Output(c, 1, shape, counts);
  }

 private:
  RowStore::HotKeyOrder order_ = RowStore::HotKeyOrder::kByCount;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableHotKeys").Device(tf::DEVICE_CPU),
                        MemoryChecked<HotKeysOp>);

class DecayCountsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "factor", 0));
    const float factor = c->input(1).scalar<float>()();
    if (!(factor >= 0.f && factor <= 1.f)) {
      return absl::InvalidArgumentError(absl::StrCat("factor is ", factor, "; allowed: 0 to 1"));
    }
    const ExclusiveLock lock(table->mutex());
    table->rows().DecayCounts(factor);
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableDecayCounts").Device(tf::DEVICE_CPU),
                        MemoryChecked<DecayCountsOp>);

class StatisticsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    std::vector<int64_t> values;
    {
      const SharedLock lock(table->mutex());
      values = {table->rows().size(), table->bytes(), table->rows().num_evicted(),
                table->updates().num_dropped(), table->rows().index_capacity()};
    }
    return Output(c, 0, tf::TensorShape({5}), values);
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableStatistics").Device(tf::DEVICE_CPU),
                        MemoryChecked<StatisticsOp>);

class ExportOp : public OneTableOp {
 public:
  explicit ExportOp(tf::OpKernelConstruction* c) : OneTableOp(c) {
    OP_REQUIRES_OK(c, c->GetAttr("flushes", &flushes_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TableContents contents;
    {
      const ExclusiveLock lock(table->mutex());
      if (flushes_) FlushDeferred(table, ParallelOf(c));
      contents = table->Export();
    }
    const int64_t n = static_cast<int64_t>(contents.keys.size());
    TF_RETURN_IF_ERROR(Output(c, 0, tf::TensorShape({n}), contents.keys));
    TF_RETURN_IF_ERROR(Output(c, 1, tf::TensorShape({n, table->dim()}), contents.rows));
    TF_RETURN_IF_ERROR(Output(c, 2, tf::TensorShape({n, table->slots_per_row()}), contents.slots));
    TF_RETURN_IF_ERROR(Output(c, 3, tf::TensorShape({n}), contents.counts));
    TF_RETURN_IF_ERROR(Output(c, 4,
                              tf::TensorShape({static_cast<int64_t>(contents.last_used.size())}),
                              contents.last_used));
    const std::vector<int64_t> steps = {contents.update_step, contents.lookup_step};
    return Output(c, 5, tf::TensorShape({2}), steps);
  }

 private:
  bool flushes_ = true;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableExport").Device(tf::DEVICE_CPU),
                        MemoryChecked<ExportOp>);

class ImportOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    const char* names[] = {"handle", "keys", "rows", "slots", "counts", "last_used", "steps"};
    const int ranks[] = {0, 1, 2, 2, 1, 1, 1};
    for (int i = 1; i < 7; ++i) TF_RETURN_IF_ERROR(RequireRank(c, i, names[i], ranks[i]));
    const int64_t n = c->input(1).dim_size(0);
    const int64_t widths[] = {table->dim(), table->slots_per_row()};
    for (int i = 2; i < 4; ++i) {
      const tf::TensorShape expected({n, widths[i - 2]});
      if (c->input(i).shape() != expected) {
        return absl::InvalidArgumentError(
            absl::StrCat(names[i], " of table '", table->options().name, "' have shape ",
                         c->input(i).shape().DebugString(), "; allowed: ", expected.DebugString()));
      }
    }
    if (c->input(6).dim_size(0) != 2) {
      return absl::InvalidArgumentError(
          absl::StrCat("steps has ", c->input(6).dim_size(0), " values; allowed: 2"));
    }
    TableContents contents;
    Copy(c->input(1), &contents.keys);
    Copy(c->input(2), &contents.rows);
    Copy(c->input(3), &contents.slots);
    Copy(c->input(4), &contents.counts);
    Copy(c->input(5), &contents.last_used);
    contents.update_step = c->input(6).flat<int64_t>()(0);
    contents.lookup_step = c->input(6).flat<int64_t>()(1);
    const ExclusiveLock lock(table->mutex());
    return ToAbsl(table->Import(contents));
  }

 private:
  template <class T>
  static void Copy(const tf::Tensor& tensor, std::vector<T>* out) {
    const T* data = tensor.flat<T>().data();
    out->assign(data, data + tensor.NumElements());
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableImport").Device(tf::DEVICE_CPU),
                        MemoryChecked<ImportOp>);

}  // namespace
}  // namespace slipstream
