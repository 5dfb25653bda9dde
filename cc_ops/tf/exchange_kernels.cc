// Kernels that collect gradient rows for other processes and apply theirs.
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/row_exchange.h"
#include "cc_ops/tf/feature_inputs.h"
#include "cc_ops/tf/one_table_op.h"
#include "cc_ops/tf/plan_variant.h"
#include "cc_ops/tf/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

absl::Status OutputParcels(tf::OpKernelContext* c, const RowParcels& parcels) {
  const int64_t ranks = parcels.ranks;
  const int64_t tables = static_cast<int64_t>(parcels.sizes.size()) / ranks;
  TF_RETURN_IF_ERROR(Output(c, 0, tf::TensorShape({ranks, tables}), parcels.sizes));
  const auto vector_of = [](size_t n) { return tf::TensorShape({static_cast<int64_t>(n)}); };
  TF_RETURN_IF_ERROR(Output(c, 1, vector_of(parcels.keys.size()), parcels.keys));
  return Output(c, 2, vector_of(parcels.values.size()), parcels.values);
}

class CollectGradientsOp : public tf::OpKernel {
 public:
  explicit CollectGradientsOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &ranks_));
  }
  void Compute(tf::OpKernelContext* c) override {
    const LookupPlan* plan = nullptr;
    std::vector<PooledGradient> gradients;
    OP_REQUIRES_OK(c, ReadPlanAndGradients(c, &plan, &gradients));
    const tf::Tensor& rate = c->input(c->num_inputs() - 1);
    OP_REQUIRES(c, rate.dims() == 0, absl::InvalidArgumentError("learning_rate must be a scalar"));
    RowParcels parcels;
    OP_REQUIRES_OK(c, ToAbsl(CollectGradients(*plan, gradients, rate.scalar<float>()(), ranks_,
                                              ParallelOf(c), &parcels)));
    OP_REQUIRES_OK(c, OutputParcels(c, parcels));
  }

 private:
  int ranks_ = 1;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamCollectGradients").Device(tf::DEVICE_CPU),
                        CollectGradientsOp);

class CollectHeldOp : public tf::OpKernel {
 public:
  explicit CollectHeldOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &ranks_));
  }
  void Compute(tf::OpKernelContext* c) override {
    TableResources resources;
    std::vector<EmbeddingTable*> tables;
    OP_REQUIRES_OK(c, ReadTables(c, &resources, &tables));
    RowParcels parcels;
    CollectHeld(tables, ranks_, &parcels);
    OP_REQUIRES_OK(c, OutputParcels(c, parcels));
  }

 private:
  int ranks_ = 1;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamCollectHeld").Device(tf::DEVICE_CPU), CollectHeldOp);

// The inputs sizes, keys and values from `first` on.
absl::Status ReadParcels(tf::OpKernelContext* c, int first, size_t num_tables,
                         RowParcelsView* view) {
  const tf::Tensor &sizes = c->input(first), &keys = c->input(first + 1),
                   &values = c->input(first + 2);
  if (sizes.dims() != 2 || sizes.dim_size(1) != static_cast<int64_t>(num_tables)) {
    return absl::InvalidArgumentError(absl::StrCat("sizes have shape ", sizes.shape().DebugString(),
                                                   "; allowed: [ranks, ", num_tables, "]"));
  }
  if (keys.dims() != 1 || values.dims() != 1) {
    return absl::InvalidArgumentError(absl::StrCat("keys have shape ", keys.shape().DebugString(),
                                                   " and values ", values.shape().DebugString(),
                                                   "; allowed: rank 1"));
  }
  view->ranks = static_cast<int>(sizes.dim_size(0));
  view->sizes = sizes.flat<int64_t>().data();
  view->keys = keys.flat<int64_t>().data();
  view->num_keys = keys.NumElements();
  view->values = values.flat<float>().data();
  view->num_values = values.NumElements();
  return absl::OkStatus();
}

class ApplyRowsOp : public tf::OpKernel {
 public:
  explicit ApplyRowsOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(c, c->GetAttr("makes_rows", &makes_rows_));
  }
  void Compute(tf::OpKernelContext* c) override {
    TableResources resources;
    std::vector<EmbeddingTable*> tables;
    OP_REQUIRES_OK(c, ReadTables(c, &resources, &tables));
    RowParcelsView parcels;
    OP_REQUIRES_OK(c, ReadParcels(c, c->num_inputs() - 4, tables.size(), &parcels));
    const tf::Tensor& rate = c->input(c->num_inputs() - 1);
    OP_REQUIRES(c, rate.dims() == 0, absl::InvalidArgumentError("learning_rate must be a scalar"));
    OP_REQUIRES_OK(c, ToAbsl(ApplyRows(tables, parcels, rate.scalar<float>()(), scale_, makes_rows_,
                                       ParallelOf(c))));
  }

 private:
  float scale_ = 1.f;
  bool makes_rows_ = true;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamApplyRows").Device(tf::DEVICE_CPU), ApplyRowsOp);

}  // namespace
}  // namespace slipstream
