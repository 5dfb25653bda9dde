// CPU kernels of key sets.
#include "cc_ops/tf/containers/key_set_kernels.h"

#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {

REGISTER_KERNEL_BUILDER(Name("SlipstreamKeySet").Device(tensorflow::DEVICE_CPU),
                        MemoryChecked<CreateResourceKernel<KeySetResource>>);
REGISTER_KERNEL_BUILDER(Name("SlipstreamKeySetAssign").Device(tensorflow::DEVICE_CPU),
                        MemoryChecked<AssignKeySetKernel>);

}  // namespace slipstream
