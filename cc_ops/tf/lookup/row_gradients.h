// The gradients of all lookups of a training step as one tensor.
//
// The tape of TensorFlow sums the gradients of the lookups that share a SlipstreamRowSource. The
// sum is the list of the summands, because only the update can add gradients per key.
#ifndef SLIPSTREAM_CC_OPS_TF_LOOKUP_ROW_GRADIENTS_H_
#define SLIPSTREAM_CC_OPS_TF_LOOKUP_ROW_GRADIENTS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/update/gradient_update.h"
#include "cc_ops/tf/lookup/plan_variant.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace slipstream {

// See the top of the file. Empty for a SlipstreamRowSource.
struct RowGradients {
  struct OfLookup {
    PlanVariant plan;
    std::vector<tensorflow::Tensor> gradients;  // In the shapes of the pooled outputs.
  };
  std::vector<OfLookup> lookups;

  // The interface that tf::Variant requires. Plans contain pointers and cannot leave the process.
  static std::string TypeName() { return "slipstream::RowGradients"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData* data) const { data->set_type_name(TypeName()); }
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// A plan and its gradients, read from the inputs of a kernel.
struct PlannedUpdate {
  const LookupPlan* plan = nullptr;
  std::vector<PooledGradient> gradients;  // One per feature of the plan.
  // The plan, if multiple lookups were merged.
  std::unique_ptr<LookupPlan> merged;
};

// Reads the input "plan", a plan or RowGradients, and the list "gradients", which is empty for
// RowGradients.
//
// advice: if not empty, RowGradients must be of lookups after which no row was updated. The end of
// the error otherwise.
//
// Returns InvalidArgument if the gradients do not have the shapes of the pooled outputs of the
// lookup, or there is no lookup.
absl::Status ReadUpdate(tensorflow::OpKernelContext* context, const std::string& advice,
                        PlannedUpdate* update);

// Returns InvalidArgument if gradients of these lookups were collected before and a table masks or
// defers gradients, which would then do so twice. plan: RowGradients, or any other plan.
absl::Status MarkCollected(const tensorflow::Tensor& plan);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_LOOKUP_ROW_GRADIENTS_H_
