// Kernels of every step: lookups and the updates after them.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/update/gradient_update.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/lookup/lookup_op.h"
#include "cc_ops/tf/lookup/plan_variant.h"
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

absl::Status ReadPlanAndGradients(tf::OpKernelContext* c, const LookupPlan** plan,
                                  std::vector<PooledGradient>* views) {
  const PlanVariant* variant = nullptr;
  TF_RETURN_IF_ERROR(ReadPlan(c, 0, &variant));
  *plan = &variant->workspace->plan;
  const std::vector<int64_t>& generations = (*plan)->generations;
  if (std::find(generations.begin(), generations.end(), -1) != generations.end()) {
    return absl::InvalidArgumentError(
        "plan contains no rows to update; expected the plan of a training lookup");
  }
  const LookupPlan& lookup = **plan;
  tf::OpInputList gradients;
  TF_RETURN_IF_ERROR(c->input_list("gradients", &gradients));
  const int num_features = static_cast<int>(lookup.feature_table.size());
  const auto dim_of = [&](int f) { return lookup.tables[lookup.feature_table[f]]->dim(); };
  const bool is_stacked = gradients.size() == 1 && gradients[0].dims() == 3;
  if (!is_stacked && gradients.size() != num_features) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients has ", gradients.size(), " tensors; expected ", num_features,
                     ", the number of features of the lookup, or 1 tensor of rank 3"));
  }
  for (int f = 0; f < num_features; ++f) {
    const tf::Tensor& g = gradients[is_stacked ? 0 : f];
    const tf::TensorShape expected =
        is_stacked ? tf::TensorShape({lookup.examples[f], int64_t{num_features}, dim_of(f)})
                   : tf::TensorShape({lookup.examples[f], dim_of(f)});
    if (g.shape() != expected) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradient of feature ", f, " has shape ", g.shape().DebugString(),
                       "; expected ", expected.DebugString(), ", the shape of its pooled output"));
    }
    const float* data = g.flat<float>().data();
    if (is_stacked) {
      views->push_back({data + f * dim_of(f), num_features * dim_of(f)});
    } else {
      views->push_back({data, dim_of(f)});
    }
  }
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
  using LookupOpBase::LookupOpBase;
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
                                               ParallelOf(c), plan.workspace.get())));
    OP_REQUIRES_OK(c, OutputPlan(c, c->num_outputs() - 1, std::move(plan)));
  }

 private:
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

absl::Status ApplyToRows(tf::OpKernelContext* c) {
  const LookupPlan* plan = nullptr;
  std::vector<PooledGradient> gradients;
  LearningRates rates;
  TF_RETURN_IF_ERROR(ReadPlanAndGradients(c, &plan, &gradients));
  TF_RETURN_IF_ERROR(ReadLearningRates(c, c->num_inputs() - 1, &rates));
  return ToAbsl(ApplyGradients(*plan, gradients, rates, ParallelOf(c)));
}

SLIPSTREAM_CPU_KERNEL("SlipstreamLookup", LookupOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamEvaluationLookup", EvaluationLookupOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamApplyGradients", FunctionKernel<ApplyToRows>);

}  // namespace
}  // namespace slipstream
