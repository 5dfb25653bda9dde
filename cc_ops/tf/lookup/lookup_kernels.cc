// Kernels of every step: lookups and the updates after them.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/lookup/access_count.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/update/gradient_update.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/lookup/lookup_op.h"
#include "cc_ops/tf/lookup/plan_variant.h"
#include "cc_ops/tf/lookup/row_gradients.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace slipstream {
namespace tf = tensorflow;

absl::Status ReadPlan(tf::OpKernelContext* c, int input, const PlanVariant** plan) {
  TF_RETURN_IF_ERROR(CheckInputs(c, input, "plan: []"));
  *plan = c->input(input).scalar<tf::Variant>()().get<PlanVariant>();
  if (*plan != nullptr && (*plan)->workspace != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "plan is empty or has another type; expected the plan that SlipstreamLookup, "
      "SlipstreamRouteKeys or SlipstreamLookUpPulled returned for the same tables in this process");
}

absl::Status OutputPlan(tf::OpKernelContext* c, int output, PlanVariant plan) {
  tf::Tensor* out = nullptr;
  tf::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  TF_RETURN_IF_ERROR(c->allocate_output(output, tf::TensorShape({}), &out, on_host));
  out->scalar<tf::Variant>()() = std::move(plan);
  return absl::OkStatus();
}

absl::Status ReadLearningRates(tf::OpKernelContext* c, int input, LearningRates* rates) {
  const tf::Tensor& tensor = c->input(input);
  if (tensor.dims() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "learning_rate has shape ", tensor.shape().DebugString(), "; expected [] or [tables]"));
  }
  *rates = LearningRates(ValuesOf<float>(c, input));
  return absl::OkStatus();
}

namespace {

// If a lookup and its backward pass are separate functions, TensorFlow passes the plan between them
// as an output and creates a zero gradient for it. No code reads this gradient.
absl::Status ZerosLikePlan(tf::OpKernelContext*, const PlanVariant&, PlanVariant* zeros) {
  *zeros = PlanVariant();
  return absl::OkStatus();
}
using tf::TypeIndex;  // The macro names it unqualified.
REGISTER_UNARY_VARIANT_UNARY_OP_FUNCTION(tf::ZEROS_LIKE_VARIANT_UNARY_OP, tf::DEVICE_CPU,
                                         PlanVariant, ZerosLikePlan);

class LookupOp : public LookupOpBase {
 public:
  explicit LookupOp(tf::OpKernelConstruction* c) : LookupOpBase(c) {
    OP_REQUIRES_OK(c, c->GetAttr("joins_step", &joins_step_));
  }
  void Compute(tf::OpKernelContext* c) override {
    auto resources = std::make_shared<TableResources>();
    std::vector<EmbeddingTable*> tables;
    std::vector<FeatureView> features;
    std::vector<PooledOutput> outputs;
    OP_REQUIRES_OK(c, Prepare(c, resources.get(), &tables, &features, &outputs));
    PlanVariant plan;
    plan.workspace = pool_->Take();
    plan.resources = std::move(resources);
    OP_REQUIRES_OK(c, ToAbsl(LookupForTraining(tables, features, combiners(), outputs,
                                               ParallelOf(c), plan.workspace.get(), joins_step_)));
    OP_REQUIRES_OK(c, OutputPlan(c, c->num_outputs() - 1, std::move(plan)));
  }

 private:
  bool joins_step_ = false;
  const std::shared_ptr<WorkspacePool> pool_ = std::make_shared<WorkspacePool>();
};

class TableCountAccessesOp : public tf::OpKernel {
 public:
  explicit TableCountAccessesOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    int num_tables = 0;
    OP_REQUIRES_OK(c, c->GetAttr("num_tables", &num_tables));
    OP_REQUIRES_OK(c, inputs_.Init(c, num_tables));
  }
  void Compute(tf::OpKernelContext* c) override {
    TableResources resources;
    std::vector<EmbeddingTable*> tables;
    std::vector<FeatureView> features;
    int64_t batch = 0;
    OP_REQUIRES_OK(c, ReadTables(c, &resources, &tables));
    OP_REQUIRES_OK(c, inputs_.Read(c, &features, &batch));
    OP_REQUIRES_OK(c, ToAbsl(CountAccesses(tables, features, ParallelOf(c), pool_->Take().get())));
  }

 private:
  FeatureInputs inputs_;
  const std::shared_ptr<WorkspacePool> pool_ = std::make_shared<WorkspacePool>();
};

class EvaluationLookupOp : public LookupOpBase {
 public:
  using LookupOpBase::LookupOpBase;
  void Compute(tf::OpKernelContext* c) override {
    TableResources resources;
    std::vector<EmbeddingTable*> tables;
    std::vector<FeatureView> features;
    std::vector<PooledOutput> outputs;
    OP_REQUIRES_OK(c, Prepare(c, &resources, &tables, &features, &outputs));
    OP_REQUIRES_OK(c, ToAbsl(FlushBeforeReading(tables, ParallelOf(c))));
    OP_REQUIRES_OK(
        c, ToAbsl(LookupForEvaluation(tables, features, combiners(), outputs, ParallelOf(c))));
  }
};

class ApplyGradientsOp : public tf::OpKernel {
 public:
  explicit ApplyGradientsOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("advice", &advice_));
  }
  void Compute(tf::OpKernelContext* c) override {
    PlannedUpdate update;
    LearningRates rates;
    OP_REQUIRES_OK(c, ReadUpdate(c, advice_, &update));
    OP_REQUIRES_OK(c, ReadLearningRates(c, c->num_inputs() - 1, &rates));
    OP_REQUIRES_OK(c, ToAbsl(ApplyGradients(*update.plan, update.gradients, rates, ParallelOf(c))));
  }

 private:
  std::string advice_;
};

SLIPSTREAM_CPU_KERNEL("SlipstreamLookup", LookupOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamTableCountAccesses", TableCountAccessesOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamEvaluationLookup", EvaluationLookupOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamApplyGradients", ApplyGradientsOp);

}  // namespace
}  // namespace slipstream
