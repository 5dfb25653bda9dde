// Kernels that run in every step: lookups and the update after them.
#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/work_crew.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/update/gradient_update.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "cc_ops/tf/lookup/plan_variant.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace slipstream {
namespace tf = tensorflow;

absl::Status ReadPlanAndGradients(tf::OpKernelContext* c, const LookupPlan** plan,
                                  std::vector<PooledGradient>* views) {
  TF_RETURN_IF_ERROR(CheckInputs(c, 0, "plan: []"));
  const PlanVariant* variant = c->input(0).scalar<tf::Variant>()().get<PlanVariant>();
  if (variant == nullptr || variant->workspace == nullptr) {
    return absl::InvalidArgumentError("plan is not one that SlipstreamLookup gave");
  }
  *plan = &variant->workspace->plan;
  const LookupPlan& lookup = **plan;
  tf::OpInputList gradients;
  TF_RETURN_IF_ERROR(c->input_list("gradients", &gradients));
  const int num_features = static_cast<int>(lookup.feature_table.size());
  const auto dim_of = [&](int f) { return lookup.tables[lookup.feature_table[f]]->dim(); };
  const bool is_stacked = gradients.size() == 1 && gradients[0].dims() == 3;
  if (!is_stacked && gradients.size() != num_features) {
    return absl::InvalidArgumentError(absl::StrCat(
        gradients.size(), " gradients given; the lookup had ", num_features, " features"));
  }
  for (int f = 0; f < num_features; ++f) {
    const tf::Tensor& g = gradients[is_stacked ? 0 : f];
    const tf::TensorShape expected =
        is_stacked ? tf::TensorShape({lookup.examples[f], int64_t{num_features}, dim_of(f)})
                   : tf::TensorShape({lookup.examples[f], dim_of(f)});
    if (g.shape() != expected) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradient of feature ", f, " has shape ", g.shape().DebugString(),
                       "; allowed: that of its pooled output, ", expected.DebugString()));
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
    return absl::InvalidArgumentError(absl::StrCat("learning_rate has shape ",
                                                   tensor.shape().DebugString(),
                                                   "; allowed: a scalar, or [tables]"));
  }
  *rates = LearningRates(ValuesOf<float>(c, input));
  return absl::OkStatus();
}

namespace {

// Keeps the memory of finished lookups for the next ones.
class WorkspacePool : public std::enable_shared_from_this<WorkspacePool> {
 public:
  // A workspace that comes back to this pool when its last owner is gone.
  std::shared_ptr<LookupWorkspace> Take() {
    std::unique_ptr<LookupWorkspace> workspace;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        workspace = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (workspace == nullptr) workspace = std::make_unique<LookupWorkspace>();
    return std::shared_ptr<LookupWorkspace>(
        workspace.release(), [pool = shared_from_this()](LookupWorkspace* w) { pool->Put(w); });
  }

 private:
  static constexpr size_t kMostKept = 4;

  void Put(LookupWorkspace* workspace) {
    std::unique_ptr<LookupWorkspace> owned(workspace);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() < kMostKept) free_.push_back(std::move(owned));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<LookupWorkspace>> free_;
};

// Where a lookup and its backward pass are functions of their own, TensorFlow passes the plan from
// one to the other as an output and makes a zero gradient for it, which nobody reads.
absl::Status ZerosLikePlan(tf::OpKernelContext*, const PlanVariant&, PlanVariant* zeros) {
  *zeros = PlanVariant();
  return absl::OkStatus();
}
using tf::TypeIndex;  // The macro names it unqualified.
REGISTER_UNARY_VARIANT_UNARY_OP_FUNCTION(tf::ZEROS_LIKE_VARIANT_UNARY_OP, tf::DEVICE_CPU,
                                         PlanVariant, ZerosLikePlan);

class LookupOpBase : public tf::OpKernel {
 public:
  explicit LookupOpBase(tf::OpKernelConstruction* c) : OpKernel(c) {
    int num_tables = 0;
    OP_REQUIRES_OK(c, c->GetAttr("num_tables", &num_tables));
    OP_REQUIRES_OK(c, inputs_.Init(c, num_tables));
    OP_REQUIRES_OK(c, c->GetAttr("is_stacked", &is_stacked_));
    OP_REQUIRES_OK(c, c->GetAttr("table_dims", &dims_));
    std::vector<std::string> combiners;
    OP_REQUIRES_OK(c, c->GetAttr("combiners", &combiners));
    OP_REQUIRES(c, static_cast<int>(combiners.size()) == inputs_.num_features(),
                absl::InvalidArgumentError(absl::StrCat("combiners has ", combiners.size(),
                                                        " entries; there are ",
                                                        inputs_.num_features(), " features")));
    // Eager calls run no shape function.
    int num_outputs = 0;
    OP_REQUIRES_OK(c, c->GetAttr("num_outputs", &num_outputs));
    const int needed = is_stacked_ ? 1 : inputs_.num_features();
    OP_REQUIRES(c, num_outputs == needed,
                absl::InvalidArgumentError(
                    absl::StrCat("num_outputs is ", num_outputs, "; allowed: ", needed)));
    OP_REQUIRES(
        c, static_cast<int>(dims_.size()) == num_tables,
        absl::InvalidArgumentError(absl::StrCat("table_dims has ", dims_.size(),
                                                " entries; there are ", num_tables, " handles")));
    const auto dim_of = [&](int f) { return dims_[inputs_.feature_table()[f]]; };
    for (int f = 1; is_stacked_ && f < inputs_.num_features(); ++f) {
      OP_REQUIRES(c, dim_of(f) == dim_of(0),
                  absl::InvalidArgumentError(absl::StrCat("features 0 and ", f, " have dims ",
                                                          dim_of(0), " and ", dim_of(f),
                                                          "; is_stacked needs equal ones")));
    }
    for (const std::string& name : combiners) {
      is_unpooled_.push_back(name == "none");
      OP_REQUIRES(c, !is_stacked_ || !is_unpooled_.back(),
                  absl::InvalidArgumentError(
                      "a feature has combiner 'none'; is_stacked needs features that are pooled"));
      combiners_.push_back(name == "sum"    ? Combiner::kSum
                           : name == "none" ? Combiner::kSum
                           : name == "mean" ? Combiner::kMean
                                            : Combiner::kSqrtn);
    }
  }

 protected:
  absl::Status Prepare(tf::OpKernelContext* c, TableResources* resources,
                       std::vector<EmbeddingTable*>* tables, std::vector<FeatureView>* features,
                       std::vector<PooledOutput>* outputs) const {
    TF_RETURN_IF_ERROR(ReadTables(c, resources, tables));
    for (size_t t = 0; t < tables->size(); ++t) {
      const EmbeddingTable& table = *(*tables)[t];
      if (table.dim() != dims_[t]) {
        return absl::InvalidArgumentError(absl::StrCat("table_dims[", t, "] is ", dims_[t],
                                                       "; table '", table.options().name,
                                                       "' has dim ", table.dim()));
      }
    }
    int64_t batch = 0;
    TF_RETURN_IF_ERROR(inputs_.Read(c, features, &batch));
    tf::OpOutputList pooled;
    TF_RETURN_IF_ERROR(c->output_list("pooled", &pooled));
    const int64_t num_features = inputs_.num_features();
    tf::Tensor* out = nullptr;
    for (int f = 0; f < num_features; ++f) {
      const int64_t dim = dims_[inputs_.feature_table()[f]];
      if (is_unpooled_[f]) (*features)[f].TakeApart();
      if (!is_stacked_ || f == 0) {
        const tf::TensorShape shape = is_stacked_ ? tf::TensorShape({batch, num_features, dim})
                                                  : tf::TensorShape({(*features)[f].batch, dim});
        TF_RETURN_IF_ERROR(pooled.allocate(f, shape, &out));
      }
      float* const data = out->flat<float>().data();
      outputs->push_back(is_stacked_ ? PooledOutput{data + f * dim, num_features * dim}
                                     : PooledOutput{data, dim});
    }
    return absl::OkStatus();
  }

  const std::vector<Combiner>& combiners() const { return combiners_; }

 private:
  FeatureInputs inputs_;
  bool is_stacked_ = false;
  std::vector<int> dims_;
  std::vector<Combiner> combiners_;
  std::vector<bool> is_unpooled_;
};

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
    tf::Tensor* out = nullptr;
    tf::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    OP_REQUIRES_OK(c, c->allocate_output(c->num_outputs() - 1, tf::TensorShape({}), &out, on_host));
    out->scalar<tf::Variant>()() = std::move(plan);
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
