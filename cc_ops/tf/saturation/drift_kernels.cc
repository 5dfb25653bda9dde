// CPU kernel of SlipstreamRowDrift.
#include "cc_ops/tf/saturation/drift_kernels.h"

#include "cc_ops/tf/base/memory_checked.h"
#include "tensorflow/core/util/work_sharder.h"

namespace slipstream {
namespace {

class RowDriftCpuOp : public RowDriftOpBase {
 public:
  using RowDriftOpBase::RowDriftOpBase;

 protected:
  absl::Status Run(tensorflow::OpKernelContext* context, const tensorflow::Tensor& current,
                   const tensorflow::Tensor& snapshot, tensorflow::Tensor* drift) override {
    const float* a = current.flat<float>().data();
    const float* b = snapshot.flat<float>().data();
    float* out = drift->flat<float>().data();
    const int64_t dim = current.dim_size(1);
    const DriftMetric metric = metric_;
    const double epsilon = epsilon_;
    const auto* workers = context->device()->tensorflow_cpu_worker_threads();
    const int64_t cycles_per_row = 2 * dim + 4;
    tensorflow::Shard(
        workers->num_threads, workers->workers, current.dim_size(0), cycles_per_row,
        [=](int64_t begin, int64_t end) { RowDrift(a, b, begin, end, dim, metric, epsilon, out); });
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("SlipstreamRowDrift").Device(tensorflow::DEVICE_CPU),
                        MemoryChecked<RowDriftCpuOp>);

}  // namespace
}  // namespace slipstream
