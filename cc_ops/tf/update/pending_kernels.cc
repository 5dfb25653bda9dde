// Kernels that read and replace what a table holds beside its rows: pending updates, and how far
// watched rows have travelled.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/update/pending_updates.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/table/one_table_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

class ExportPendingOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    PendingUpdates pending;
    float rate = 0.f;
    {
      const ExclusiveLock lock(table->mutex());
      pending = ExportPending(table);
      rate = table->updates().last_learning_rate();
    }
    const int64_t n = static_cast<int64_t>(pending.keys.size());
    TF_RETURN_IF_ERROR(Output(c, 0, tf::TensorShape({n}), pending.keys));
    TF_RETURN_IF_ERROR(Output(c, 1, tf::TensorShape({n}), pending.ages));
    TF_RETURN_IF_ERROR(Output(c, 2, tf::TensorShape({n}), pending.ranks));
    TF_RETURN_IF_ERROR(Output(c, 3, tf::TensorShape({n, table->dim()}), pending.sums));
    return Output(c, 4, tf::TensorShape({}), std::vector<float>{rate});
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableExportPending").Device(tf::DEVICE_CPU),
                        MemoryChecked<ExportPendingOp>);

class ImportPendingOp : public OneTableOp {
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
          absl::StrCat("learning_rate of the pending updates of table '", table->options().name,
                       "' is ", rate, "; allowed: a finite number"));
    }
    PendingUpdates pending;
    Copy(c->input(1), &pending.keys);
    Copy(c->input(2), &pending.ages);
    Copy(c->input(3), &pending.ranks);
    Copy(c->input(4), &pending.sums);
    const ExclusiveLock lock(table->mutex());
    TF_RETURN_IF_ERROR(ToAbsl(ImportPending(table, pending)));
    table->updates().set_last_learning_rate(rate);
    return absl::OkStatus();
  }

 private:
  template <class T>
  static void Copy(const tf::Tensor& tensor, std::vector<T>* out) {
    const T* data = tensor.flat<T>().data();
    out->assign(data, data + tensor.NumElements());
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableImportPending").Device(tf::DEVICE_CPU),
                        MemoryChecked<ImportPendingOp>);

class MarksOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    const tf::Tensor& keys = c->input(1);
    tf::Tensor* marks = nullptr;
    TF_RETURN_IF_ERROR(c->allocate_output(0, keys.shape(), &marks));
    const SharedLock lock(table->mutex());
    table->flags().Get(keys.flat<int64_t>().data(), keys.NumElements(), table->rows(),
                       marks->flat<uint8_t>().data());
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableMarks").Device(tf::DEVICE_CPU),
                        MemoryChecked<MarksOp>);

class SetTravelledOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    const tf::Tensor &keys = c->input(1), &travelled = c->input(2);
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    if (travelled.shape() != keys.shape()) {
      return absl::InvalidArgumentError(
          absl::StrCat("travelled has shape ", travelled.shape().DebugString(),
                       "; allowed: that of the keys, ", keys.shape().DebugString()));
    }
    const auto values = travelled.flat<float>();
    for (int64_t i = 0; i < values.size(); ++i) {
      if (values(i) >= 0.f) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "travelled of key ", keys.flat<int64_t>()(i), " of table '", table->options().name,
          "', at place ", i, ", is ", values(i), "; allowed: 0 or more. Nothing was replaced"));
    }
    const ExclusiveLock lock(table->mutex());
    table->flags().SetSquaredUpdateLengths(keys.flat<int64_t>().data(),
                                           travelled.flat<float>().data(), keys.NumElements(),
                                           table->rows());
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableSetTravelled").Device(tf::DEVICE_CPU),
                        MemoryChecked<SetTravelledOp>);

}  // namespace
}  // namespace slipstream
