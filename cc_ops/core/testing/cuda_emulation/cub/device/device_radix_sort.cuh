// CUB's stable sort of pairs, emulated on the CPU.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_

#include <algorithm>
#include <utility>
#include <vector>

#include "cc_ops/core/testing/cuda_emulation/cuda_runtime_api.h"

namespace cub {

struct DeviceRadixSort {
  // The bits must be all bits of the keys.
  template <class Key, class Value, class N>
  static cudaError_t SortPairs(void* scratch, size_t& bytes, const Key* keys, Key* sorted_keys,
                               const Value* values, Value* sorted_values, N n, int first_bit = 0,
                               int end_bit = 8 * sizeof(Key), cudaStream_t stream = nullptr) {
    if (first_bit != 0 || end_bit != 8 * sizeof(Key)) {
      return slipstream::emulation::Report(cudaErrorInvalidValue);
    }
    const size_t needed = static_cast<size_t>(n) * (sizeof(Key) + sizeof(Value)) + 1;
    return slipstream::emulation::EnqueueWithScratch(stream, scratch, needed, &bytes, [=] {
      std::vector<std::pair<Key, Value>> pairs;
      for (N i = 0; i < n; ++i) pairs.emplace_back(keys[i], values[i]);
      std::stable_sort(pairs.begin(), pairs.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      for (N i = 0; i < n; ++i) {
        sorted_keys[i] = pairs[static_cast<size_t>(i)].first;
        sorted_values[i] = pairs[static_cast<size_t>(i)].second;
      }
    });
  }
};

}  // namespace cub

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_
