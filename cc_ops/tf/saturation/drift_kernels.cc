// CPU kernel of SlipstreamRowDrift.
#include "cc_ops/tf/saturation/drift_kernels.h"

#include "cc_ops/tf/base/memory_checked.h"
#include "tensorflow/core/util/work_sharder.h"

namespace slipstream {
namespace {

struct DriftOnCpu {
  static absl::Status Run(tensorflow::OpKernelContext* context, int64_t rows, int64_t dim,
                          DriftMetric metric, float* drift) {
    const float *a = Data<float>(context, 0), *b = Data<float>(context, 1);
    const auto* workers = context->device()->tensorflow_cpu_worker_threads();
    const int64_t cycles_per_row = 2 * dim + 4;
    tensorflow::Shard(
        workers->num_threads, workers->workers, rows, cycles_per_row,
        [=](int64_t begin, int64_t end) { RowDrift(a, b, begin, end, dim, metric, drift); });
    return absl::OkStatus();
  }
};

SLIPSTREAM_CPU_KERNEL("SlipstreamRowDrift", RowDriftKernel<DriftOnCpu>);

}  // namespace
}  // namespace slipstream
