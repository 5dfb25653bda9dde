// CUB's prefix sums, emulated on the CPU.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUB_DEVICE_DEVICE_SCAN_CUH_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUB_DEVICE_DEVICE_SCAN_CUH_

#include "cc_ops/core/testing/cuda_emulation/cuda_runtime_api.h"

namespace cub {

struct DeviceScan {
  template <class T, class N>
  static cudaError_t ExclusiveSum(void* scratch, size_t& bytes, const T* values, T* sums, N n,
                                  cudaStream_t stream = nullptr) {
    return slipstream::emulation::EnqueueWithScratch(stream, scratch, 257, &bytes, [=] {
      T sum = 0;
      for (N i = 0; i < n; ++i) {
        const T value = values[i];  // Input and output may be the same memory.
        sums[i] = sum;
        sum += value;
      }
    });
  }
};

}  // namespace cub

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUB_DEVICE_DEVICE_SCAN_CUH_
