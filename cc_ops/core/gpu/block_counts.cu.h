// Counts and ranks within a block, so that a block needs one global atomic instead of one for each
// row. Include it in .cu.cc files only.
//
// All threads of a block must call these functions together.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_BLOCK_COUNTS_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_BLOCK_COUNTS_CU_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cc_ops/core/gpu/launch.cu.h"

namespace slipstream {

constexpr int kWarpsPerBlock = kThreadsPerBlock / kWarpSize;

// The place of a thread among the threads of its block.
struct BlockRank {
  unsigned before;  // Sum of the numbers of the threads before this one.
  unsigned total;   // Sum of the numbers of all threads.
};

// Ranks the threads with `is_counted`.
__device__ inline BlockRank RankInBlock(bool is_counted) {
  __shared__ unsigned counts[kWarpsPerBlock];
  const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned counted = __ballot_sync(kAllLanes, is_counted);
  __syncthreads();  // The block may still read the counts of an earlier call.
  if (lane == 0) counts[warp] = __popc(counted);
  __syncthreads();
  BlockRank rank = {static_cast<unsigned>(__popc(counted & ((1u << lane) - 1))), 0};
  for (unsigned w = 0; w < kWarpsPerBlock; ++w) {
    if (w < warp) rank.before += counts[w];
    rank.total += counts[w];
  }
  return rank;
}

// Returns the sum of the threads' numbers.
__device__ inline unsigned SumOfBlock(unsigned number) {
  __shared__ unsigned sums[kWarpsPerBlock];
  const unsigned sum = __reduce_add_sync(kAllLanes, number);
  __syncthreads();  // As above.
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  unsigned total = 0;
  for (unsigned w = 0; w < kWarpsPerBlock; ++w) total += sums[w];
  return total;
}

// Adds the sum of the threads' numbers to a counter in global memory.
__device__ inline void AddOfBlock(unsigned number, int64_t* counter) {
  const unsigned sum = SumOfBlock(number);
  if (threadIdx.x == 0 && sum > 0) Add64(counter, sum);
}

// Appends the threads with `is_added` to a list of `size` elements, and adds their number to
// `size`. Returns the position of this thread in the list. Blocks append in any order.
__device__ inline int64_t AppendOfBlock(bool is_added, int64_t* size) {
  __shared__ int64_t begin;
  const BlockRank rank = RankInBlock(is_added);
  if (threadIdx.x == 0 && rank.total > 0) begin = Add64(size, rank.total);
  __syncthreads();
  return begin + rank.before;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_BLOCK_COUNTS_CU_H_
