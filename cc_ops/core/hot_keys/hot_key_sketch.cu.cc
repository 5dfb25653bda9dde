#include "cc_ops/core/hot_keys/hot_key_sketch.cu.h"

#include <cuda_runtime.h>

#include "cc_ops/core/gpu/launch.cu.h"

namespace slipstream {
namespace {

__device__ bool IsCounted(const bool* counts, int64_t i) { return counts == nullptr || counts[i]; }

__global__ void AddKernel(AccessSketch sketch, const int64_t* __restrict__ keys,
                          const bool* __restrict__ counts, int64_t n, int64_t unit) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    if (!IsCounted(counts, i)) continue;
    for (int row = 0; row < AccessSketch::kRows; ++row) {
      Add64(sketch.Counter(row, keys[i]), unit);
    }
  }
}

__global__ void ClaimKernel(HotKeySketch hot, const int64_t* __restrict__ keys,
                            const bool* __restrict__ counts, int64_t n) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    if (!IsCounted(counts, i) || keys[i] == HotKeySketch::kNoOwner) continue;
    const uint64_t claim = HotKeySketch::ClaimOf(hot.sketch.Estimate(keys[i]), i);
    for (int row = 0; row < AccessSketch::kRows; ++row) {
      const int64_t counter = hot.sketch.Counter(row, keys[i]) - hot.sketch.counters;
      Max64(hot.challenges + counter, claim);
    }
  }
}

// Only the winner of a counter finds its own claim there, and clears it.
__global__ void SettleKernel(HotKeySketch hot, const int64_t* __restrict__ keys,
                             const bool* __restrict__ counts, int64_t n) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    if (!IsCounted(counts, i) || keys[i] == HotKeySketch::kNoOwner) continue;
    const int64_t estimate = hot.sketch.Estimate(keys[i]);
    const uint64_t claim = HotKeySketch::ClaimOf(estimate, i);
    for (int row = 0; row < AccessSketch::kRows; ++row) {
      const int64_t counter = hot.sketch.Counter(row, keys[i]) - hot.sketch.counters;
      if (atomicCAS(Unsigned(hot.challenges + counter), claim, 0) != claim) continue;
      if (hot.TakesOver(hot.owners[counter], estimate)) hot.owners[counter] = keys[i];
    }
  }
}

}  // namespace

cudaError_t LaunchCountAccesses(cudaStream_t stream, const HotKeySketch& hot, const int64_t* keys,
                                const bool* counts, int64_t n, int64_t unit) {
  if (n > HotKeySketch::kMaxBatch) return cudaErrorInvalidValue;
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(
      Launch(stream, BlocksFor(n), AddKernel, hot.sketch, keys, counts, n, unit));
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(Launch(stream, BlocksFor(n), ClaimKernel, hot, keys, counts, n));
  return Launch(stream, BlocksFor(n), SettleKernel, hot, keys, counts, n);
}

}  // namespace slipstream
