#include "cc_ops/core/saturation/drift.cu.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/row_lanes.cu.h"

namespace slipstream {
namespace {

// The distance of a row from its snapshot. Each lane adds its values, then the distances of the
// other lanes of the row.
template <DriftMetric>
struct Distance;

// Compares bit patterns, so that a NaN is larger than all numbers (see drift.cc).
template <>
struct Distance<DriftMetric::kLinf> {
  unsigned largest = 0;

  __device__ void Add(float a, float b) { largest = max(largest, __float_as_uint(fabsf(a - b))); }
  __device__ void AddLane(unsigned mask, int bits) {
    largest = max(largest, __shfl_xor_sync(mask, largest, bits));
  }
  __device__ float Result() const { return __uint_as_float(largest); }
};

template <>
struct Distance<DriftMetric::kL2> {
  double squares = 0;

  __device__ void Add(float a, float b) {
    const double difference = static_cast<double>(a) - static_cast<double>(b);
    squares += difference * difference;
  }
  __device__ void AddLane(unsigned mask, int bits) {
    squares += __shfl_xor_sync(mask, squares, bits);
  }
  __device__ float Result() const { return static_cast<float>(sqrt(squares)); }
};

template <DriftMetric kMetric>
__device__ void AddTo(Distance<kMetric>* distance, float a, float b) {
  distance->Add(a, b);
}
template <DriftMetric kMetric>
__device__ void AddTo(Distance<kMetric>* distance, float4 a, float4 b) {
  distance->Add(a.x, b.x);
  distance->Add(a.y, b.y);
  distance->Add(a.z, b.z);
  distance->Add(a.w, b.w);
}

template <DriftMetric kMetric, class Lanes>
__global__ void RowDriftKernel(Lanes lanes, const float* __restrict__ current,
                               const float* __restrict__ snapshot, int64_t rows,
                               float* __restrict__ drift) {
  for (int64_t row = lanes.first_row(); row < rows; row += lanes.rows_of_grid()) {
    const auto* const a = lanes.Row(current, row);
    const auto* const b = lanes.Row(snapshot, row);
    Distance<kMetric> distance;
    for (int64_t j = lanes.lane(); j < lanes.width; j += lanes.num_lanes()) {
      AddTo(&distance, a[j], b[j]);
    }
    for (int bits = lanes.num_lanes() / 2; bits > 0; bits /= 2) {
      distance.AddLane(lanes.mask(), bits);
    }
    if (lanes.lane() == 0) drift[row] = distance.Result();
  }
}

template <DriftMetric kMetric>
cudaError_t LaunchMetric(cudaStream_t stream, const float* current, const float* snapshot,
                         int64_t rows, int64_t dim, float* drift) {
  return WithRowLanes(dim, {current, snapshot}, [&](const auto& lanes) {
    return Launch(stream, lanes.BlocksForRows(rows),
                  RowDriftKernel<kMetric, std::decay_t<decltype(lanes)>>, lanes, current, snapshot,
                  rows, drift);
  });
}

}  // namespace

cudaError_t LaunchRowDrift(cudaStream_t stream, const float* current, const float* snapshot,
                           int64_t rows, int64_t dim, DriftMetric metric, float* drift) {
  if (rows == 0) return cudaSuccess;
  switch (metric) {
    case DriftMetric::kLinf:
      return LaunchMetric<DriftMetric::kLinf>(stream, current, snapshot, rows, dim, drift);
    case DriftMetric::kL2:
      return LaunchMetric<DriftMetric::kL2>(stream, current, snapshot, rows, dim, drift);
  }
  return cudaErrorInvalidValue;
}

}  // namespace slipstream
