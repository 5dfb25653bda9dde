// Kernels that look up rows from other ranks.
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc_ops/core/exchange/pulled_lookup.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/exchange/buffer_inputs.h"
#include "cc_ops/tf/lookup/lookup_op.h"
#include "cc_ops/tf/lookup/plan_variant.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

class RouteKeysOp : public tf::OpKernel {
 public:
  explicit RouteKeysOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    int num_tables = 0;
    OP_REQUIRES_OK(c, c->GetAttr("num_tables", &num_tables));
    OP_REQUIRES_OK(c, inputs_.Init(c, num_tables));
    OP_REQUIRES_OK(c, combiners_.Init(c, inputs_.num_features()));
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &ranks_));
  }
  void Compute(tf::OpKernelContext* c) override {
    PlanVariant plan = {std::make_shared<TableResources>(), pool_->Take()};
    std::vector<EmbeddingTable*> tables;
    std::vector<FeatureView> features;
    int64_t batch = 0;
    OP_REQUIRES_OK(c, ReadTables(c, plan.resources.get(), &tables));
    OP_REQUIRES_OK(c, inputs_.Read(c, &features, &batch));
    combiners_.SplitPositions(&features);
    SendBuffer requests;
    OP_REQUIRES_OK(c, ToAbsl(RouteKeys(tables, features, combiners_.list(), ranks_, ParallelOf(c),
                                       plan.workspace.get(), &requests)));
    const tf::TensorShape shape({ranks_, static_cast<int64_t>(tables.size())});
    OP_REQUIRES_OK(c, Output(c, 0, shape, requests.sizes));
    OP_REQUIRES_OK(c, Output(c, 1, requests.keys));
    OP_REQUIRES_OK(c, OutputPlan(c, 2, std::move(plan)));
  }

 private:
  FeatureInputs inputs_;
  FeatureCombiners combiners_;
  int ranks_ = 1;
  const std::shared_ptr<WorkspacePool> pool_ = std::make_shared<WorkspacePool>();
};

// Reads the inputs sizes, keys and messages, starting at input `first`.
absl::Status ReadPulled(tf::OpKernelContext* c, int first, int64_t num_tables,
                        PulledMessages* messages) {
  TF_RETURN_IF_ERROR(ReadBuffer(c, first, num_tables, false, &messages->keys));
  TF_RETURN_IF_ERROR(CheckInputs(c, first + 2, "messages: [?]"));
  messages->bytes = Data<uint8_t>(c, first + 2);
  messages->num_bytes = c->input(first + 2).NumElements();
  return absl::OkStatus();
}

class LookUpPulledOp : public LookupOpBase {
 public:
  explicit LookUpPulledOp(tf::OpKernelConstruction* c) : LookupOpBase(c) {
    OP_REQUIRES_OK(c, c->GetAttr("training", &training_));
    OP_REQUIRES_OK(c, c->GetAttr("joins_step", &joins_step_));
  }
  void Compute(tf::OpKernelContext* c) override {
    TableResources resources;
    std::vector<EmbeddingTable*> tables;
    std::vector<FeatureView> features;
    std::vector<PooledOutput> outputs;
    OP_REQUIRES_OK(c, Prepare(c, &resources, &tables, &features, &outputs));
    const int first = c->num_inputs() - 4;
    const PlanVariant* plan = nullptr;
    OP_REQUIRES_OK(c, ReadPlan(c, first, &plan));
    OP_REQUIRES(c, plan->workspace->plan.tables == tables,
                absl::InvalidArgumentError(
                    "plan belongs to other tables; expected the plan that SlipstreamRouteKeys "
                    "returned for the same handles, in the same order, in this process"));
    PulledMessages messages;
    OP_REQUIRES_OK(c, ReadPulled(c, first + 1, static_cast<int64_t>(tables.size()), &messages));
    OP_REQUIRES_OK(c, ToAbsl(LookUpPulled(features, combiners(), outputs, messages, training_,
                                          ParallelOf(c), plan->workspace.get(), joins_step_)));
    OP_REQUIRES_OK(c, OutputPlan(c, c->num_outputs() - 1, *plan));
  }

 private:
  bool training_ = true, joins_step_ = false;
};

SLIPSTREAM_CPU_KERNEL("SlipstreamRouteKeys", RouteKeysOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamLookUpPulled", LookUpPulledOp);

}  // namespace
}  // namespace slipstream
