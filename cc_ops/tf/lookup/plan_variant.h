// A lookup's plan as a tensor, and how kernels that update after a lookup read it.
#ifndef SLIPSTREAM_CC_OPS_TF_LOOKUP_PLAN_VARIANT_H_
#define SLIPSTREAM_CC_OPS_TF_LOOKUP_PLAN_VARIANT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/update/gradient_update.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace slipstream {

// A lookup's plan as a tensor: it keeps its tables alive.
struct PlanVariant {
  std::shared_ptr<TableResources> resources;
  std::shared_ptr<LookupWorkspace> workspace;

  // What tf::Variant asks of its values. A plan holds pointers: it cannot leave
  // the process.
  static std::string TypeName() { return "slipstream::LookupPlan"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData* data) const { data->set_type_name(TypeName()); }
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// The plan in an input.
absl::Status ReadPlan(tensorflow::OpKernelContext* context, int input, const PlanVariant** plan);
absl::Status OutputPlan(tensorflow::OpKernelContext* context, int output, PlanVariant plan);

// The plan in input 0 and views of the inputs "gradients", one per feature.
absl::Status ReadPlanAndGradients(tensorflow::OpKernelContext* context, const LookupPlan** plan,
                                  std::vector<PooledGradient>* gradients);

// Input `input`, a scalar or a vector; the core checks that it has a rate for each table.
absl::Status ReadLearningRates(tensorflow::OpKernelContext* context, int input,
                               LearningRates* rates);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_LOOKUP_PLAN_VARIANT_H_
