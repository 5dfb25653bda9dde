#include "cc_ops/core/saturation/drift_classification.cu.h"

#include <cuda_runtime.h>

#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/saturation/skip_score.h"

namespace slipstream {
namespace {

// Bits of a non-negative float without the sign; this is the highest.
constexpr int kHighestBit = 30;

// Returns the `required`-th smallest of m values, which are bits of non-negative floats and
// therefore ordered like them. Finds it bit by bit, as the largest number with fewer than
// `required` values below. Lane j of the warp reads the values j, j + 32, ... by `value_at`.
template <class ValueAt>
__device__ unsigned NthSmallest(int64_t m, int64_t required, int lane, const ValueAt& value_at) {
  unsigned found = 0;
  for (int bit = kHighestBit; bit >= 0; --bit) {
    const unsigned candidate = found | (1u << bit);
    unsigned below = 0;
    for (int64_t j = lane; j < m; j += kWarpSize) below += value_at(j) < candidate ? 1u : 0u;
    if (__reduce_add_sync(kAllLanes, below) < required) found = candidate;
  }
  return found;
}

__device__ int64_t Clamped(int64_t value, int64_t minimum, int64_t maximum) {
  return value < minimum ? minimum : (value > maximum ? maximum : value);
}

// One warp per example.
__global__ void ClassifyKernel(DriftIndexView drifts, DriftClassifier classifier,
                               LookupLists lookups, uint64_t first_number,
                               uint32_t* __restrict__ scratch, Classified result) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t i = ThreadOfGrid() / kWarpSize; i < lookups.batch; i += step) {
    const int64_t begin = Clamped(lookups.offsets[i], 0, lookups.num_lookups);
    // Number of lookups and padding entries.
    const int64_t size = Clamped(lookups.offsets[i + 1], begin, lookups.num_lookups) - begin;
    const int64_t* const keys = lookups.keys + begin;
    const int32_t* const tables = lookups.tables + begin;
    unsigned own_lookups = 0;
    for (int64_t j = lane; j < size; j += kWarpSize) own_lookups += tables[j] >= 0 ? 1u : 0u;
    const auto m = static_cast<int64_t>(__reduce_add_sync(kAllLanes, own_lookups));
    const int64_t required = m == 0 ? 0 : RequiredLookups(classifier.alpha, m);
    // Padding sorts last, like keys that are not tracked, and is never the required value.
    const auto drift_of = [&](int64_t j) {
      const float drift =
          tables[j] < 0 ? DriftEntry::kUntracked : drifts.Find({keys[j], tables[j]}).drift;
      return __float_as_uint(drift);
    };
    unsigned score = __float_as_uint(DriftEntry::kUntracked);
    if (m > 0 && required == m) {
      unsigned largest = 0;
      for (int64_t j = lane; j < size; j += kWarpSize) {
        if (tables[j] >= 0) largest = max(largest, drift_of(j));
      }
      score = __reduce_max_sync(kAllLanes, largest);
    } else if (m > 0 && size <= kWarpSize) {
      const unsigned own = lane < size ? drift_of(lane) : 0;
      score = NthSmallest(size, required, lane, [own](int64_t) { return own; });
    } else if (m > 0) {
      uint32_t* const own = scratch + begin;
      for (int64_t j = lane; j < size; j += kWarpSize) own[j] = drift_of(j);
      score = NthSmallest(size, required, lane, [own](int64_t j) { return own[j]; });
    }
    if (lane == 0) {
      const float drift = __uint_as_float(score);
      result.Write(i, drift, classifier.Decide(drift, first_number, i));
    }
  }
}

}  // namespace

cudaError_t LaunchClassifyByDrift(cudaStream_t stream, const DriftIndexView& drifts,
                                  const DriftClassifier& classifier, const LookupLists& lookups,
                                  uint64_t first_number, uint32_t* scratch,
                                  const Classified& result) {
  if (classifier.settings.mode == SkipMode::kPredictedLoss) return cudaErrorInvalidValue;
  if (lookups.batch == 0) return cudaSuccess;
  return Launch(stream, BlocksFor(lookups.batch * kWarpSize), ClassifyKernel, drifts, classifier,
                lookups, first_number, scratch, result);
}

}  // namespace slipstream
