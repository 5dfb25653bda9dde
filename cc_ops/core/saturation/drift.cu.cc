#include "cc_ops/core/saturation/drift.cu.h"

#include <cuda_runtime.h>

#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/row_lanes.cu.h"

namespace slipstream {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;

// The distance of a row from its snapshot. Each lane adds its values, then the distances of the
// other lanes of the row.
template <DriftMetric>
struct Distance;

// Compares bit patterns, so that a NaN is larger than all numbers (see drift.cc).
template <>
struct Distance<DriftMetric::kLinf> {
  unsigned largest = 0;

  __device__ void Add(float a, float b) { largest = max(largest, __float_as_uint(fabsf(a - b))); }
  __device__ void AddLane(int bits) {
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, bits));
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
  __device__ void AddLane(int bits) { squares += __shfl_xor_sync(kFullWarp, squares, bits); }
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

template <DriftMetric kMetric, class Vector>
__global__ void RowDriftKernel(const Vector* __restrict__ current,
                               const Vector* __restrict__ snapshot, int64_t rows, RowLanes lanes,
                               float* __restrict__ drift) {
  const int64_t first = lanes.RowOfGrid();
  const int64_t rows_before = threadIdx.x % kWarpSize >> lanes.log2_lanes;
  // All lanes of a warp make the same number of rounds, because they exchange values.
  for (int64_t begin = first - rows_before; begin < rows; begin += lanes.RowsOfGrid()) {
    const int64_t row = begin + rows_before;
    const int64_t offset = row * lanes.width, width = row < rows ? lanes.width : 0;
    Distance<kMetric> distance;
    for (int64_t j = lanes.Lane(); j < width; j += lanes.lanes()) {
      AddTo(&distance, current[offset + j], snapshot[offset + j]);
    }
    for (int bits = lanes.lanes() / 2; bits > 0; bits /= 2) distance.AddLane(bits);
    if (row < rows && lanes.Lane() == 0) drift[row] = distance.Result();
  }
}

template <DriftMetric kMetric>
void LaunchMetric(cudaStream_t stream, const float* current, const float* snapshot, int64_t rows,
                  int64_t dim, float* drift) {
  WithRowLanes(dim, {current, snapshot}, [&](RowLanes lanes, auto vector) {
    using Vector = decltype(vector);
    Launch(stream, BlocksFor(rows * lanes.lanes()), RowDriftKernel<kMetric, Vector>,
           reinterpret_cast<const Vector*>(current), reinterpret_cast<const Vector*>(snapshot),
           rows, lanes, drift);
  });
}

}  // namespace

cudaError_t LaunchRowDrift(cudaStream_t stream, const float* current, const float* snapshot,
                           int64_t rows, int64_t dim, DriftMetric metric, float* drift) {
  if (rows == 0) return cudaSuccess;
  switch (metric) {
    case DriftMetric::kLinf:
      LaunchMetric<DriftMetric::kLinf>(stream, current, snapshot, rows, dim, drift);
      break;
    case DriftMetric::kL2:
      LaunchMetric<DriftMetric::kL2>(stream, current, snapshot, rows, dim, drift);
      break;
  }
  return cudaGetLastError();
}

}  // namespace slipstream
