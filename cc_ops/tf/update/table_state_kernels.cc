// Kernels that read and replace what a table has beside its rows: deferred gradients, row flags and
// squared update lengths.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/update/deferred_export.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/table/one_table_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

class ExportDeferredOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    DeferredContents contents;
    float rate = 0.f;
    {
      const ExclusiveLock lock(table->mutex());
      contents = ExportDeferred(table);
      rate = table->updates().last_learning_rate();
    }
    const int64_t n = contents.size();
    TF_RETURN_IF_ERROR(Output(c, 0, tf::TensorShape({n}), contents.keys));
    TF_RETURN_IF_ERROR(Output(c, 1, tf::TensorShape({n}), contents.ages));
    TF_RETURN_IF_ERROR(Output(c, 2, tf::TensorShape({n}), contents.ranks));
    TF_RETURN_IF_ERROR(Output(c, 3, tf::TensorShape({n, table->dim()}), contents.sums));
    return OutputScalar(c, 4, rate);
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableExportDeferred").Device(tf::DEVICE_CPU),
                        MemoryChecked<ExportDeferredOp>);

class ImportDeferredOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    const char* names[] = {"handle", "keys", "ages", "ranks"};
    for (int i = 1; i < 4; ++i) TF_RETURN_IF_ERROR(RequireRank(c, i, names[i], 1));
    const int64_t n = c->input(1).NumElements();
    const tf::TensorShape expected({n, table->dim()});
    if (c->input(4).shape() != expected) {
      return absl::InvalidArgumentError(
          absl::StrCat("sums of table '", table->options().name, "' have shape ",
                       c->input(4).shape().DebugString(), "; allowed: ", expected.DebugString()));
    }
    float rate = 0.f;
    TF_RETURN_IF_ERROR(ReadScalar(c, 5, "learning_rate", &rate));
    if (!std::isfinite(rate)) {
      return absl::InvalidArgumentError(
          absl::StrCat("learning_rate of the deferred gradients of table '", table->options().name,
                       "' is ", rate, "; allowed: a finite number"));
    }
    const DeferredContents contents = {
        ValuesOf<int64_t>(c->input(1)), ValuesOf<int64_t>(c->input(2)),
        ValuesOf<int32_t>(c->input(3)), ValuesOf<float>(c->input(4))};
    const ExclusiveLock lock(table->mutex());
    TF_RETURN_IF_ERROR(ToAbsl(ImportDeferred(table, contents)));
    table->updates().set_last_learning_rate(rate);
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableImportDeferred").Device(tf::DEVICE_CPU),
                        MemoryChecked<ImportDeferredOp>);

class RowFlagsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    const tf::Tensor& keys = c->input(1);
    tf::Tensor* flags = nullptr;
    TF_RETURN_IF_ERROR(c->allocate_output(0, keys.shape(), &flags));
    const SharedLock lock(table->mutex());
    table->flags().Get(keys.flat<int64_t>().data(), keys.NumElements(), table->rows(),
                       flags->flat<uint8_t>().data());
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableRowFlags").Device(tf::DEVICE_CPU),
                        MemoryChecked<RowFlagsOp>);

class SetSquaredUpdateLengthsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    const tf::Tensor &keys = c->input(1), &lengths = c->input(2);
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    if (lengths.shape() != keys.shape()) {
      return absl::InvalidArgumentError(
          absl::StrCat("lengths has shape ", lengths.shape().DebugString(),
                       "; allowed: that of the keys, ", keys.shape().DebugString()));
    }
    const auto values = lengths.flat<float>();
    for (int64_t i = 0; i < values.size(); ++i) {
      if (values(i) >= 0.f) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("squared update length of key ", keys.flat<int64_t>()(i), " of table '",
                       table->options().name, "', at index ", i, ", is ", values(i),
                       "; allowed: 0 or more. Nothing was replaced"));
    }
    const ExclusiveLock lock(table->mutex());
    table->flags().SetSquaredUpdateLengths(keys.flat<int64_t>().data(),
                                           lengths.flat<float>().data(), keys.NumElements(),
                                           table->rows());
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableSetSquaredUpdateLengths").Device(tf::DEVICE_CPU),
                        MemoryChecked<SetSquaredUpdateLengthsOp>);

}  // namespace
}  // namespace slipstream
