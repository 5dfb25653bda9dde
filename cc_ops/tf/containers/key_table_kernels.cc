// CPU kernels of key sets: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/containers/key_table_kernels.h"

#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

SLIPSTREAM_CPU_KERNEL("SlipstreamKeySet", FunctionKernel<CreateResource<KeySetResource>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamKeySetAssign", ResourceKernel<AssignKeySet<OnCpu>>);

}  // namespace
}  // namespace slipstream
