#include "cc_ops/core/gpu/scan_and_sort.cu.h"

#include <cuda_runtime.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

namespace slipstream {

cudaError_t ScanBytes(int64_t n, size_t* bytes) {
  int32_t* const values = nullptr;
  return cub::DeviceScan::ExclusiveSum(nullptr, *bytes, values, values, static_cast<int>(n));
}

template <class Key>
cudaError_t SortBytes(int64_t n, size_t* bytes) {
  Key* const keys = nullptr;
  int32_t* const values = nullptr;
  return cub::DeviceRadixSort::SortPairs(nullptr, *bytes, keys, keys, values, values,
                                         static_cast<int>(n));
}

cudaError_t LaunchScan(cudaStream_t stream, void* scratch, size_t bytes, int64_t n,
                       int32_t* values) {
  return cub::DeviceScan::ExclusiveSum(scratch, bytes, values, values, static_cast<int>(n), stream);
}

template <class Key>
cudaError_t LaunchSort(cudaStream_t stream, void* scratch, size_t bytes, int64_t n, const Key* keys,
                       const int32_t* values, Key* sorted_keys, int32_t* sorted_values) {
  return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, values, sorted_values,
                                         static_cast<int>(n), 0, static_cast<int>(8 * sizeof(Key)),
                                         stream);
}

template cudaError_t SortBytes<int32_t>(int64_t, size_t*);
template cudaError_t SortBytes<int64_t>(int64_t, size_t*);
template cudaError_t LaunchSort(cudaStream_t, void*, size_t, int64_t, const int32_t*,
                                const int32_t*, int32_t*, int32_t*);
template cudaError_t LaunchSort(cudaStream_t, void*, size_t, int64_t, const int64_t*,
                                const int32_t*, int64_t*, int32_t*);

}  // namespace slipstream
