// Prefix sums and stable sorts with cub, compiled once because cub compiles slowly.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_SCAN_AND_SORT_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_SCAN_AND_SORT_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace slipstream {

// Store in `bytes` the size of the scratch memory for n <= 2^31 - 1 values. They return the error
// of cub's size query, which needs a device.
cudaError_t ScanBytes(int64_t n, size_t* bytes);
template <class Key>  // Key is int32_t or int64_t.
cudaError_t SortBytes(int64_t n, size_t* bytes);

// Both functions enqueue on `stream` and return immediately. All pointers are to device memory.
// scratch: [bytes], aligned to 256; `bytes` is at least the result of ScanBytes or SortBytes.

// Replaces each of values [n] by the sum of the values before it.
cudaError_t LaunchScan(cudaStream_t stream, void* scratch, size_t bytes, int64_t n,
                       int32_t* values);

// Sorts keys ascending together with their values, stably. Input and output must not overlap.
template <class Key>
cudaError_t LaunchSort(cudaStream_t stream, void* scratch, size_t bytes, int64_t n, const Key* keys,
                       const int32_t* values, Key* sorted_keys, int32_t* sorted_values);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_SCAN_AND_SORT_CU_H_
