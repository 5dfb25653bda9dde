// What the CPU and the GPU kernel of SlipstreamRowDrift share: attributes and checks.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_KERNELS_H_

#include <cmath>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/drift.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace slipstream {

class RowDriftOpBase : public tensorflow::OpKernel {
 public:
  explicit RowDriftOpBase(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    std::string metric;
    OP_REQUIRES_OK(construction, construction->GetAttr("metric", &metric));
    OP_REQUIRES_OK(construction, construction->GetAttr("epsilon", &epsilon_));
    OP_REQUIRES(construction, std::isfinite(epsilon_) && epsilon_ > 0,
                absl::InvalidArgumentError(absl::StrCat("Invalid `epsilon`: ", epsilon_,
                                                        ". Use a positive finite number.")));
    // The registration allows no other value.
    metric_ = DriftMetricNamed(metric);
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& current = context->input(0);
    const tensorflow::Tensor& snapshot = context->input(1);
    OP_REQUIRES(
        context, current.dims() == 2,
        absl::InvalidArgumentError(absl::StrCat("`current` must have the shape [rows, dim], got ",
                                                current.shape().DebugString(), ".")));
    OP_REQUIRES(
        context, snapshot.shape() == current.shape(),
        absl::InvalidArgumentError(absl::StrCat(
            "`snapshot` has the shape ", snapshot.shape().DebugString(), " but `current` has ",
            current.shape().DebugString(), ". Both must be the same [rows, dim].")));
    tensorflow::Tensor* drift = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, tensorflow::TensorShape({current.dim_size(0)}), &drift));
    OP_REQUIRES_OK(context, Run(context, current, snapshot, drift));
  }

 protected:
  // Fills `drift` [rows]; the shapes have been checked.
  virtual absl::Status Run(tensorflow::OpKernelContext* context, const tensorflow::Tensor& current,
                           const tensorflow::Tensor& snapshot, tensorflow::Tensor* drift) = 0;

  DriftMetric metric_ = DriftMetric::kLinf;
  float epsilon_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_KERNELS_H_
