// Kernels that collect gradient rows for other processes and apply rows from them.
#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/radix_sort.h"
#include "cc_ops/core/exchange/pull.h"
#include "cc_ops/core/exchange/push.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/exchange/buffer_inputs.h"
#include "cc_ops/tf/exchange/row_dtype.h"
#include "cc_ops/tf/lookup/plan_variant.h"
#include "cc_ops/tf/lookup/row_gradients.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

// The outputs sizes, keys, values and squares. Their memory is allocated before rows are removed
// from their tables, so that no row is lost when memory runs out.
class RowOutputs {
 public:
  RowOutputs(tf::OpKernelContext* c, int ranks, const std::vector<EmbeddingTable*>& tables)
      : c_(c), tables_(tables), shape_({ranks, static_cast<int64_t>(tables.size())}) {}

  Status Reserve(int64_t rows, int64_t values, SendTarget* target) {
    absl::Status status = c_->allocate_output(0, shape_, &sizes_);
    if (status.ok()) {
      status = c_->allocate_temp(tf::DT_INT64, tf::TensorShape({rows}), &keys_);
    }
    if (status.ok()) {
      status = c_->allocate_temp(tf::DT_FLOAT, tf::TensorShape({values}), &values_);
    }
    if (status.ok()) status = c_->allocate_output(3, shape_, &squares_);
    if (!status.ok()) return ResourceExhausted(std::string(status.message()));
    *target = {keys_.flat<int64_t>().data(), values_.flat<float>().data()};
    return OkStatus();
  }

  void Set(const SendBuffer& buffer) {
    std::copy(buffer.sizes.begin(), buffer.sizes.end(), sizes_->flat<int64_t>().data());
    std::copy(buffer.squares.begin(), buffer.squares.end(), squares_->flat<float>().data());
    int64_t rows = 0, values = 0;
    for (size_t part = 0; part < buffer.sizes.size(); ++part) {
      rows += buffer.sizes[part];
      values += buffer.sizes[part] * tables_[part % tables_.size()]->dim();
    }
    c_->set_output(1, keys_.Slice(0, rows));
    c_->set_output(2, values_.Slice(0, values));
  }

 private:
  tf::OpKernelContext* c_;
  const std::vector<EmbeddingTable*>& tables_;
  const tf::TensorShape shape_;
  tf::Tensor *sizes_ = nullptr, *squares_ = nullptr;
  tf::Tensor keys_, values_;
};

// Base of ops that collect rows: the attribute `ranks` and the outputs.
class CollectOp : public tf::OpKernel {
 public:
  explicit CollectOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &options_.ranks));
  }

 protected:
  // Calls collect(options, &buffer) for these tables.
  template <class Collect>
  void Output(tf::OpKernelContext* c, const std::vector<EmbeddingTable*>& tables,
              CollectOptions options, Collect collect) {
    RowOutputs outputs(c, options.ranks, tables);
    options.reserve = [&](int64_t rows, int64_t values, SendTarget* target) {
      return outputs.Reserve(rows, values, target);
    };
    SendBuffer buffer;
    OP_REQUIRES_OK(c, ToAbsl(collect(options, &buffer)));
    outputs.Set(buffer);
  }

  CollectOptions options_;
};

class CollectGradientsOp : public CollectOp {
 public:
  explicit CollectGradientsOp(tf::OpKernelConstruction* c) : CollectOp(c) {
    OP_REQUIRES_OK(c, c->GetAttr("advance_step", &options_.advance_step));
    OP_REQUIRES_OK(c, c->GetAttr("advice", &advice_));
    OP_REQUIRES_OK(c, c->GetAttr("passes_non_finite", &options_.passes_non_finite));
  }
  void Compute(tf::OpKernelContext* c) override {
    PlannedUpdate update;
    OP_REQUIRES_OK(c, ReadUpdate(c, advice_, &update));
    if (advice_.empty()) OP_REQUIRES_OK(c, MarkCollected(c->input(0)));
    CollectOptions options = options_;
    OP_REQUIRES_OK(c, ReadLearningRates(c, c->num_inputs() - 1, &options.learning_rate));
    Output(c, update.plan->tables, options, [&](const CollectOptions& given, SendBuffer* buffer) {
      return CollectGradients(*update.plan, update.gradients, given, ParallelOf(c), buffer);
    });
  }

 private:
  std::string advice_;
};

class CollectDeferredOp : public CollectOp {
 public:
  using CollectOp::CollectOp;
  void Compute(tf::OpKernelContext* c) override {
    TableResources resources;
    std::vector<EmbeddingTable*> tables;
    OP_REQUIRES_OK(c, ReadTables(c, &resources, &tables));
    Output(c, tables, options_, [&](const CollectOptions& given, SendBuffer* buffer) {
      return CollectAllDeferred(tables, given, buffer);
    });
  }
};

class ApplyRowsOp : public tf::OpKernel {
 public:
  explicit ApplyRowsOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("create_missing", &options_.create_missing));
  }
  void Compute(tf::OpKernelContext* c) override {
    TablesAndBuffer in;
    ApplyOptions options = options_;
    OP_REQUIRES_OK(c, in.Read(c, true));
    OP_REQUIRES_OK(c, ReadLearningRates(c, c->num_inputs() - 2, &options.learning_rate));
    OP_REQUIRES_OK(c, CheckInputs(c, c->num_inputs() - 1, "scale: [?]"));
    options.scale = ValuesOf<float>(c, c->num_inputs() - 1);
    OP_REQUIRES_OK(c, ToAbsl(ApplyRows(in.tables, in.buffer, options, ParallelOf(c))));
  }

 private:
  ApplyOptions options_;
};

class PullRowsOp : public tf::OpKernel {
 public:
  explicit PullRowsOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("create_missing", &options_.create_missing));
    OP_REQUIRES_OK(c, c->GetAttr("joins_step", &options_.joins_step));
  }
  void Compute(tf::OpKernelContext* c) override {
    TablesAndBuffer in;
    PullOptions options = options_;
    options.parallel = ParallelOf(c);
    OP_REQUIRES_OK(c, in.Read(c, false));
    RowFormat& format = options.format;
    const int last = c->num_inputs() - 1;
    OP_REQUIRES_OK(c, ReadScalar(c, last - 1, "with_summary", &format.with_summary));
    OP_REQUIRES_OK(c, ReadRowDtype(c, last, &format.dtype));
    PulledRows pulled;
    {
      // Two calls of a function may run the same op at the same time.
      const std::lock_guard<std::mutex> lock(mutex_);
      SteadyLengths* const lengths = &lengths_[static_cast<size_t>(format.dtype)];
      OP_REQUIRES_OK(c, ToAbsl(PullRows(in.tables, in.buffer, options, lengths, &pulled)));
    }
    OP_REQUIRES_OK(c, Output(c, 0, pulled.messages));
    OP_REQUIRES_OK(c, Output(c, 1, pulled.lengths));
    OP_REQUIRES_OK(c, Output(c, 2, pulled.row_bytes));
  }

 private:
  PullOptions options_;
  std::mutex mutex_;
  LengthsByDtype lengths_;  // guarded by mutex_
};

// Threads take the lists in turn.
absl::Status SortKeys(tf::OpKernelContext* c) {
  const int lists = c->num_inputs();
  std::vector<int64_t*> sorted(static_cast<size_t>(lists));
  for (int i = 0; i < lists; ++i) {
    const std::string shape = absl::StrCat("keys ", i, ": [n]");
    TF_RETURN_IF_ERROR(CheckInputs(c, i, shape.c_str()));
    TF_RETURN_IF_ERROR(Allocate(c, i, c->input(i).shape(), &sorted[i]));
  }
  const Parallel parallel = ParallelOf(c);
  parallel.run(parallel.threads, [&](int task) {
    for (int i = task; i < lists; i += parallel.threads) {
      std::vector<int64_t> keys = ValuesOf<int64_t>(c, i);
      RadixSort(&keys, [](int64_t key) { return AscendingBits(key); });
      std::copy(keys.begin(), keys.end(), sorted[i]);
    }
  });
  return absl::OkStatus();
}

SLIPSTREAM_CPU_KERNEL("SlipstreamCollectGradients", CollectGradientsOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamCollectDeferred", CollectDeferredOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamApplyRows", ApplyRowsOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamPullRows", PullRowsOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamSortKeys", FunctionKernel<SortKeys>);

}  // namespace
}  // namespace slipstream
