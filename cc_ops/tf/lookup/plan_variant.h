// The plan of a lookup as a tensor, and how update kernels read it.
#ifndef SLIPSTREAM_CC_OPS_TF_LOOKUP_PLAN_VARIANT_H_
#define SLIPSTREAM_CC_OPS_TF_LOOKUP_PLAN_VARIANT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/update/learning_rates.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace slipstream {

// The plan of a lookup as a tensor. It keeps its tables alive.
struct PlanVariant {
  std::shared_ptr<TableResources> resources;
  std::shared_ptr<LookupWorkspace> workspace;

  // The interface that tf::Variant requires. A plan contains pointers, so it cannot leave the
  // process.
  static std::string TypeName() { return "slipstream::LookupPlan"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData* data) const { data->set_type_name(TypeName()); }
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// Returns the plan in an input. Returns InvalidArgument if the input has no plan.
absl::Status ReadPlan(tensorflow::OpKernelContext* context, int input, const PlanVariant** plan);
// Outputs a plan as a scalar.
absl::Status OutputPlan(tensorflow::OpKernelContext* context, int output, PlanVariant plan);

// Reads a scalar or a vector. The core checks that a vector has one rate per table.
absl::Status ReadLearningRates(tensorflow::OpKernelContext* context, int input,
                               LearningRates* rates);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_LOOKUP_PLAN_VARIANT_H_
