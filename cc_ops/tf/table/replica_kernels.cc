// Kernels on rows of which other ranks keep copies.
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/table/replica_holders.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/table/one_table_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

int64_t StrideOf(const EmbeddingTable& table) { return table.dim() + table.slots_per_row(); }

class PublishOp : public OneTableOp {
 public:
  explicit PublishOp(tf::OpKernelConstruction* c) : OneTableOp(c) {
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &ranks_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    float movement = 0.f;
    TF_RETURN_IF_ERROR(ReadScalar(c, 2, "movement", &movement));
    if (!(movement >= 0.f) || std::isinf(movement)) {
      return absl::InvalidArgumentError(
          absl::StrCat("movement is ", movement, "; allowed: finite, at least 0"));
    }
    const tf::Tensor& keys = c->input(1);
    const ExclusiveLock lock(table->mutex());
    return ToAbsl(table->replicas().Publish(keys.flat<int64_t>().data(), keys.NumElements(),
                                            StrideOf(*table), ranks_, movement));
  }

 private:
  int ranks_ = 1;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTablePublish").Device(tf::DEVICE_CPU),
                        MemoryChecked<PublishOp>);

class ExportPublishedOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    ReplicaContents contents;
    int64_t holder_bytes = 0;
    {
      const SharedLock lock(table->mutex());
      contents = table->replicas().Export();
      holder_bytes = ReplicaHolders::HolderBytes(table->replicas().ranks());
    }
    const int64_t n = static_cast<int64_t>(contents.keys.size());
    TF_RETURN_IF_ERROR(Output(c, 0, tf::TensorShape({n}), contents.keys));
    TF_RETURN_IF_ERROR(Output(c, 1, tf::TensorShape({n, StrideOf(*table)}), contents.rows));
    return Output(c, 2, tf::TensorShape({n, holder_bytes}), contents.holders);
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableExportPublished").Device(tf::DEVICE_CPU),
                        MemoryChecked<ExportPublishedOp>);

class ImportPublishedOp : public OneTableOp {
 public:
  explicit ImportPublishedOp(tf::OpKernelConstruction* c) : OneTableOp(c) {
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &ranks_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    TF_RETURN_IF_ERROR(RequireRank(c, 2, "rows", 2));
    TF_RETURN_IF_ERROR(RequireRank(c, 3, "holders", 2));
    const auto keys = c->input(1).flat<int64_t>();
    const auto rows = c->input(2).flat<float>();
    const auto holders = c->input(3).flat<uint8_t>();
    ReplicaContents contents;
    contents.keys.assign(keys.data(), keys.data() + keys.size());
    contents.rows.assign(rows.data(), rows.data() + rows.size());
    contents.holders.assign(holders.data(), holders.data() + holders.size());
    const ExclusiveLock lock(table->mutex());
    return ToAbsl(table->replicas().Import(std::move(contents), StrideOf(*table), ranks_));
  }

 private:
  int ranks_ = 1;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableImportPublished").Device(tf::DEVICE_CPU),
                        MemoryChecked<ImportPublishedOp>);

}  // namespace
}  // namespace slipstream
