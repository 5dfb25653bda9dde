// Kernels that connect lookups with the update after them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc_ops/core/lookup/merged_plan.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/lookup/row_gradients.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

absl::Status CheckPlan(const LookupPlan& plan) {
  const std::vector<int64_t>& generations = plan.generations;
  if (std::find(generations.begin(), generations.end(), -1) == generations.end()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "plan contains no rows to update; expected the plan of a training lookup");
}

// Appends views of the gradients of a lookup, one per feature.
absl::Status AddViews(const LookupPlan& lookup, const std::vector<tf::Tensor>& gradients,
                      std::vector<PooledGradient>* views) {
  const size_t num_features = lookup.feature_table.size();
  const auto dim_of = [&](size_t f) { return lookup.tables[lookup.feature_table[f]]->dim(); };
  const bool is_stacked = gradients.size() == 1 && gradients[0].dims() == 3;
  if (!is_stacked && gradients.size() != num_features) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients has ", gradients.size(), " tensors; expected ", num_features,
                     ", the number of features of the lookup, or 1 tensor of rank 3"));
  }
  for (size_t f = 0; f < num_features; ++f) {
    const tf::Tensor& g = gradients[is_stacked ? 0 : f];
    const tf::TensorShape expected =
        is_stacked
            ? tf::TensorShape({lookup.examples[f], static_cast<int64_t>(num_features), dim_of(f)})
            : tf::TensorShape({lookup.examples[f], dim_of(f)});
    if (g.shape() != expected) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradient of feature ", f, " has shape ", g.shape().DebugString(),
                       "; expected ", expected.DebugString(), ", the shape of its pooled output"));
    }
    const float* data = g.flat<float>().data();
    if (is_stacked) {
      views->push_back({data + static_cast<int64_t>(f) * dim_of(f),
                        static_cast<int64_t>(num_features) * dim_of(f)});
    } else {
      views->push_back({data, dim_of(f)});
    }
  }
  return absl::OkStatus();
}

// Returns InvalidArgument if rows were updated after the lookup.
absl::Status CheckNotUpdated(const LookupPlan& plan, const std::string& advice) {
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    const SharedLock lock(plan.tables[t]->mutex());
    const int64_t step = plan.tables[t]->updates().step();
    if (step == plan.update_steps[t]) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "Invalid use of a lookup of table '", plan.tables[t]->options().name,
        "': its gradients arrive after another update of the table (update ", step,
        ", the lookup was made after update ", plan.update_steps[t],
        "). Expected one update per lookup, and one call of tape.gradient for all lookups of a "
        "training step. No row was updated. ",
        advice));
  }
  return absl::OkStatus();
}

absl::Status ZerosLikeGradients(tf::OpKernelContext*, const RowGradients&, RowGradients* zeros) {
  *zeros = RowGradients();
  return absl::OkStatus();
}

absl::Status AddGradients(tf::OpKernelContext*, const RowGradients& a, const RowGradients& b,
                          RowGradients* sum) {
  *sum = a;
  sum->lookups.insert(sum->lookups.end(), b.lookups.begin(), b.lookups.end());
  return absl::OkStatus();
}

using tf::TypeIndex;  // The macros name it unqualified.
REGISTER_UNARY_VARIANT_UNARY_OP_FUNCTION(tf::ZEROS_LIKE_VARIANT_UNARY_OP, tf::DEVICE_CPU,
                                         RowGradients, ZerosLikeGradients);
REGISTER_UNARY_VARIANT_BINARY_OP_FUNCTION(tf::ADD_VARIANT_BINARY_OP, tf::DEVICE_CPU, RowGradients,
                                          AddGradients);

absl::Status OutputGradients(tf::OpKernelContext* c, RowGradients gradients) {
  tf::Tensor* out = nullptr;
  tf::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  TF_RETURN_IF_ERROR(c->allocate_output(0, tf::TensorShape({}), &out, on_host));
  out->scalar<tf::Variant>()() = std::move(gradients);
  return absl::OkStatus();
}

absl::Status OutputSource(tf::OpKernelContext* c) { return OutputGradients(c, RowGradients()); }

absl::Status OutputConnected(tf::OpKernelContext* c) {
  tf::OpInputList pooled;
  TF_RETURN_IF_ERROR(c->input_list("pooled", &pooled));
  for (int i = 0; i < pooled.size(); ++i) c->set_output(i, pooled[i]);
  return absl::OkStatus();
}

absl::Status OutputRowGradients(tf::OpKernelContext* c) {
  const PlanVariant* plan = nullptr;
  TF_RETURN_IF_ERROR(ReadPlan(c, 0, &plan));
  tf::OpInputList gradients;
  TF_RETURN_IF_ERROR(c->input_list("gradients", &gradients));
  RowGradients one;
  one.lookups.push_back({*plan, {gradients.begin(), gradients.end()}});
  return OutputGradients(c, std::move(one));
}

SLIPSTREAM_CPU_KERNEL("SlipstreamRowSource", FunctionKernel<OutputSource>);
SLIPSTREAM_CPU_KERNEL("SlipstreamConnectRows", FunctionKernel<OutputConnected>);
SLIPSTREAM_CPU_KERNEL("SlipstreamRowGradients", FunctionKernel<OutputRowGradients>);

// Merges the lookups in the order of their calls.
absl::Status MergeLookups(tf::OpKernelContext* c, std::vector<RowGradients::OfLookup> lookups,
                          PlannedUpdate* update) {
  std::sort(lookups.begin(), lookups.end(),
            [](const RowGradients::OfLookup& a, const RowGradients::OfLookup& b) {
              return a.plan.workspace->plan.number < b.plan.workspace->plan.number;
            });
  std::vector<const LookupPlan*> plans;
  for (const RowGradients::OfLookup& lookup : lookups) {
    plans.push_back(&lookup.plan.workspace->plan);
    TF_RETURN_IF_ERROR(AddViews(*plans.back(), lookup.gradients, &update->gradients));
  }
  update->plan = plans[0];
  if (plans.size() == 1) return absl::OkStatus();
  update->merged = std::make_unique<LookupPlan>();
  update->plan = update->merged.get();
  return ToAbsl(MergePlans(plans, ParallelOf(c), update->merged.get()));
}

}  // namespace

absl::Status MarkCollected(const tf::Tensor& plan) {
  const auto* sum = plan.scalar<tf::Variant>()().get<RowGradients>();
  if (sum == nullptr) return absl::OkStatus();
  for (const RowGradients::OfLookup& lookup : sum->lookups) {
    LookupWorkspace& workspace = *lookup.plan.workspace;
    if (!std::exchange(workspace.is_collected, true)) continue;
    for (EmbeddingTable* table : workspace.plan.tables) {
      const SharedLock lock(table->mutex());
      if (!table->updates().policy().IsActive()) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "Invalid use of a lookup of table '", table->options().name,
          "': its gradients were computed before, and the table masks or defers gradients. "
          "Expected "
          "one call of tape.gradient per lookup. Remove MaskGradients and DeferGradients, or look "
          "up the keys again for each call."));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadUpdate(tf::OpKernelContext* c, const std::string& advice, PlannedUpdate* update) {
  TF_RETURN_IF_ERROR(CheckInputs(c, 0, "plan: []"));
  const auto* sum = c->input(0).scalar<tf::Variant>()().get<RowGradients>();
  tf::OpInputList gradients;
  TF_RETURN_IF_ERROR(c->input_list("gradients", &gradients));
  if (sum == nullptr) {
    const PlanVariant* plan = nullptr;
    TF_RETURN_IF_ERROR(ReadPlan(c, 0, &plan));
    update->plan = &plan->workspace->plan;
    TF_RETURN_IF_ERROR(CheckPlan(*update->plan));
    return AddViews(*update->plan, {gradients.begin(), gradients.end()}, &update->gradients);
  }
  if (sum->lookups.empty() || gradients.size() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "plan has the gradients of ", sum->lookups.size(), " lookups, and gradients has ",
        gradients.size(), " tensors; expected at least one lookup and no further gradients"));
  }
  for (const RowGradients::OfLookup& lookup : sum->lookups) {
    const LookupPlan& plan = lookup.plan.workspace->plan;
    TF_RETURN_IF_ERROR(CheckPlan(plan));
    if (!advice.empty()) TF_RETURN_IF_ERROR(CheckNotUpdated(plan, advice));
  }
  return MergeLookups(c, sum->lookups, update);
}

}  // namespace slipstream
