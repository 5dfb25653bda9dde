// What the CUDA launchers share: grids of threads, and workspaces that the caller allocates.
// For .cu.cc files only.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_LAUNCH_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_LAUNCH_CU_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace slipstream {

constexpr int kWarpSize = 32;
constexpr int kThreadsPerBlock = 256;
constexpr int64_t kMaxBlocks = 65535;

// Blocks of kThreadsPerBlock for so many threads; never 0, which is an error to launch. Kernels
// take several rounds where there are more.
inline unsigned BlocksFor(int64_t threads) {
  return static_cast<unsigned>(
      std::clamp<int64_t>((threads + kThreadsPerBlock - 1) / kThreadsPerBlock, 1, kMaxBlocks));
}

// This thread among all of the grid, and how many there are.
__device__ inline int64_t ThreadOfGrid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline int64_t ThreadsOfGrid() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Hands out the parts of a workspace, one after the other; without one it only adds up their bytes.
class WorkspaceParts {
 public:
  // base: 256-byte aligned, or null.
  explicit WorkspaceParts(void* base) : base_(static_cast<char*>(base)) {}

  // Null without a workspace.
  template <class T>
  T* Take(int64_t count) {
    char* const part = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(part);
  }

  // Of all parts so far.
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlignment = 256;

  char* base_;
  size_t bytes_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_LAUNCH_CU_H_
