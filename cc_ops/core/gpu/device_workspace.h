// Device memory that a launcher works in beside its results.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_DEVICE_WORKSPACE_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_DEVICE_WORKSPACE_H_

#include <cstddef>

namespace slipstream {

struct DeviceWorkspace {
  void* data;  // 256-byte aligned
  size_t bytes;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_DEVICE_WORKSPACE_H_
