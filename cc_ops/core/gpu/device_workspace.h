// Device memory for intermediate results of a launcher.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_DEVICE_WORKSPACE_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_DEVICE_WORKSPACE_H_

#include <cstddef>

namespace slipstream {

struct DeviceWorkspace {
  void* data;  // Aligned to 256 bytes.
  size_t bytes;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_DEVICE_WORKSPACE_H_
