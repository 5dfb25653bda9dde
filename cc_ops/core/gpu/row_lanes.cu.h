// Assigns the lanes of a warp to rows of floats. Include it in .cu.cc files only.
//
// A lane moves four floats at once if all rows are aligned to 16 bytes. Short rows share a warp: a
// row of 16 floats needs 4 lanes, therefore a warp reads 8 rows at the same time.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_ROW_LANES_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_ROW_LANES_CU_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "cc_ops/core/gpu/launch.cu.h"

namespace slipstream {

// T is float or float4. A warp has one or more rows, and all lanes of a row are in one warp.
template <class T>
struct RowLanes {
  using Value = T;

  int64_t width;   // Values per row.
  int log2_lanes;  // Lanes per row, at most kWarpSize.

  explicit RowLanes(int64_t dim) : width(dim * 4 / static_cast<int64_t>(sizeof(Value))) {
    for (log2_lanes = 0; (1 << log2_lanes) < kWarpSize && (1 << log2_lanes) < width;) ++log2_lanes;
  }

  // Returns the number of blocks for n rows.
  unsigned BlocksForRows(int64_t n) const { return BlocksFor(n << log2_lanes); }

  // A thread has the rows first_row(), first_row() + rows_of_grid() and so on, and the values
  // lane(), lane() + num_lanes() and so on of each.
  __device__ int64_t first_row() const { return ThreadOfGrid() >> log2_lanes; }
  __device__ int64_t rows_of_grid() const { return ThreadsOfGrid() >> log2_lanes; }
  __device__ int num_lanes() const { return 1 << log2_lanes; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (num_lanes() - 1); }
  // Returns the lanes of this thread's row as bits.
  __device__ unsigned mask() const {
    const int first = static_cast<int>(threadIdx.x) % kWarpSize - lane();
    return (num_lanes() == kWarpSize ? ~0u : (1u << num_lanes()) - 1) << first;
  }

  // Returns the values of row i.
  __device__ const Value* Row(const float* rows, int64_t i) const {
    return reinterpret_cast<const Value*>(rows) + i * width;
  }
  __device__ Value* Row(float* rows, int64_t i) const {
    return reinterpret_cast<Value*>(rows) + i * width;
  }
};

// Calls launch(lanes) with RowLanes<float4> if all of `rows`, which have `dim` values each, are
// aligned for it, otherwise with RowLanes<float>. Returns its error.
template <class LaunchRows>
[[nodiscard]] cudaError_t WithRowLanes(int64_t dim, std::initializer_list<const float*> rows,
                                       const LaunchRows& launch) {
  bool is_aligned = dim % 4 == 0;
  for (const float* row : rows) {
    is_aligned = is_aligned && reinterpret_cast<uintptr_t>(row) % sizeof(float4) == 0;
  }
  return is_aligned ? launch(RowLanes<float4>(dim)) : launch(RowLanes<float>(dim));
}

__device__ inline float Plus(float a, float b) { return a + b; }
__device__ inline float4 Plus(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ inline bool IsFinite(float a) { return isfinite(a); }
__device__ inline bool IsFinite(float4 a) {
  return isfinite(a.x) && isfinite(a.y) && isfinite(a.z) && isfinite(a.w);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_ROW_LANES_CU_H_
