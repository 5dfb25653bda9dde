// Shared parts of the CPU and GPU kernels of SlipstreamRowDrift: attributes and checks.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_KERNELS_H_

#include <string>

#include "absl/status/status.h"
#include "cc_ops/core/base/drift.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace slipstream {

// Computes the drift of rows. Device::Run(context, rows, dim, metric, drift) fills drift [rows]
// from the inputs current and snapshot, [rows, dim].
template <class Device>
class RowDriftKernel : public tensorflow::OpKernel {
 public:
  explicit RowDriftKernel(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    std::string metric;
    OP_REQUIRES_OK(construction, construction->GetAttr("metric", &metric));
    // The registration allows no other value.
    metric_ = DriftMetricNamed(metric);
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    OP_REQUIRES_OK(context, CheckInputs(context, 0, "current: [n, d], snapshot: [n, d]"));
    const int64_t rows = context->input(0).dim_size(0), dim = context->input(0).dim_size(1);
    float* drift = nullptr;
    OP_REQUIRES_OK(context, Allocate(context, 0, tensorflow::TensorShape({rows}), &drift));
    OP_REQUIRES_OK(context, Device::Run(context, rows, dim, metric_, drift));
  }

 private:
  DriftMetric metric_ = DriftMetric::kLinf;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_KERNELS_H_
