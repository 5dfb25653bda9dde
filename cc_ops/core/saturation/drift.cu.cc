#include "cc_ops/core/saturation/drift.cu.h"

#include <cuda_runtime.h>

#include "cc_ops/core/gpu/launch.cu.h"

namespace slipstream {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ double WarpSum(double value) {
  for (int offset = kWarpSize / 2; offset > 0; offset >>= 1) {
    value += __shfl_down_sync(kFullWarp, value, offset);
  }
  return value;
}

// Compares bit patterns, so that a NaN is larger than all numbers (see drift.cc).
__device__ unsigned WarpMax(unsigned value) {
  for (int offset = kWarpSize / 2; offset > 0; offset >>= 1) {
    value = max(value, __shfl_down_sync(kFullWarp, value, offset));
  }
  return value;
}

// One warp per row. `kMetric` is a template argument, so that linf needs no double arithmetic.
template <DriftMetric kMetric>
__global__ void RowDriftKernel(const float* __restrict__ current,
                               const float* __restrict__ snapshot, int64_t rows, int64_t dim,
                               float* __restrict__ drift) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t row = ThreadOfGrid() / kWarpSize; row < rows; row += step) {
    const float* a = current + row * dim;
    const float* b = snapshot + row * dim;
    if (kMetric == DriftMetric::kLinf) {
      unsigned largest = 0;
      for (int64_t j = lane; j < dim; j += kWarpSize) {
        largest = max(largest, __float_as_uint(fabsf(a[j] - b[j])));
      }
      largest = WarpMax(largest);
      if (lane == 0) drift[row] = __uint_as_float(largest);
    } else {
      double distance = 0;
      for (int64_t j = lane; j < dim; j += kWarpSize) {
        const double difference = static_cast<double>(a[j]) - static_cast<double>(b[j]);
        distance += difference * difference;
      }
      distance = sqrt(WarpSum(distance));
      if (lane == 0) drift[row] = static_cast<float>(distance);
    }
  }
}

}  // namespace

cudaError_t LaunchRowDrift(cudaStream_t stream, const float* current, const float* snapshot,
                           int64_t rows, int64_t dim, DriftMetric metric, float* drift) {
  if (rows == 0) return cudaSuccess;
  const unsigned blocks = BlocksFor(rows * kWarpSize);
  switch (metric) {
    case DriftMetric::kLinf:
      Launch(stream, blocks, RowDriftKernel<DriftMetric::kLinf>, current, snapshot, rows, dim,
             drift);
      break;
    case DriftMetric::kL2:
      Launch(stream, blocks, RowDriftKernel<DriftMetric::kL2>, current, snapshot, rows, dim, drift);
      break;
  }
  return cudaGetLastError();
}

}  // namespace slipstream
