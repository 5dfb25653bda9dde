// GPU kernels of key sets: they copy on the stream of the op.
#define EIGEN_USE_GPU
#include "cc_ops/tf/containers/key_table_kernels.h"

#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/containers/table_on_gpu.h"

namespace slipstream {
namespace {

SLIPSTREAM_GPU_KERNEL("SlipstreamKeySet", , FunctionKernel<CreateResource<KeySetResource>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamKeySetAssign", .HostMemory("keys"),
                      ResourceKernel<AssignKeySet<OnGpu>>);

}  // namespace
}  // namespace slipstream
