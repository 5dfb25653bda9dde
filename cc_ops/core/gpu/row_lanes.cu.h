// Divides the rows of matrices [rows, dim] among the lanes of warps. Include it in .cu.cc files
// only.
//
// A lane processes four floats at once if all rows are aligned for it, and otherwise one. A row
// gets as many lanes as it has such values, rounded up to a power of two, and at most a warp.
// Therefore a warp processes 8 rows of dimension 16 at once.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_ROW_LANES_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_ROW_LANES_CU_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/gpu/launch.cu.h"

namespace slipstream {

// See the top of the file. Kernels receive it by value.
struct RowLanes {
  int log2_lanes;  // Base-2 logarithm of the number of lanes per row, from 0 to 5.
  int64_t width;   // Number of values per row, each a float4 or a float.

  SLIPSTREAM_HOST_DEVICE int lanes() const { return 1 << log2_lanes; }
  // The lane of this thread within its row.
  __device__ int Lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  // The row of this thread in the first round of a grid-stride loop, and the number of rows in each
  // round.
  __device__ int64_t RowOfGrid() const { return ThreadOfGrid() >> log2_lanes; }
  __device__ int64_t RowsOfGrid() const { return ThreadsOfGrid() >> log2_lanes; }
};

// Calls launch(lanes, Vector()) for matrices of float with rows of `dim`. Vector is float4 if all
// rows can be read in values of float4, otherwise float.
template <class LaunchWith>
void WithRowLanes(int64_t dim, std::initializer_list<const float*> matrices,
                  const LaunchWith& launch) {
  bool is_aligned = dim % 4 == 0;
  for (const float* matrix : matrices) {
    is_aligned &= reinterpret_cast<uintptr_t>(matrix) % sizeof(float4) == 0;
  }
  RowLanes lanes = {0, is_aligned ? dim / 4 : dim};
  while (lanes.lanes() < kWarpSize && lanes.lanes() < lanes.width) ++lanes.log2_lanes;
  is_aligned ? launch(lanes, float4()) : launch(lanes, float());
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_ROW_LANES_CU_H_
