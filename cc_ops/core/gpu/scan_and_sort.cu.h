// Prefix sums and stable sorts for the launchers: cub's, compiled once because it compiles slowly.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_SCAN_AND_SORT_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_SCAN_AND_SORT_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace slipstream {

// Bytes of scratch memory for n values; up to 2^31 - 1 of them. Returns the error of cub's size
// query, which needs a device.
cudaError_t ScanBytes(int64_t n, size_t* bytes);
template <class Key>  // int32_t or int64_t
cudaError_t SortBytes(int64_t n, size_t* bytes);

// Both enqueue on `stream` and return at once; all pointers are to device memory.
//   scratch: `bytes` bytes, 256-byte aligned, at least as many as the function above says.

// Replaces each of values [n] by the sum of those before it.
cudaError_t LaunchScan(cudaStream_t stream, void* scratch, size_t bytes, int64_t n,
                       int32_t* values);

// Sorts keys ascending, values with them; pairs of one key keep their order. Input and output do
// not overlap.
template <class Key>
cudaError_t LaunchSort(cudaStream_t stream, void* scratch, size_t bytes, int64_t n, const Key* keys,
                       const int32_t* values, Key* sorted_keys, int32_t* sorted_values);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_SCAN_AND_SORT_CU_H_
